"""The runner of engines over a stand-in for TensorRT and the GPU, which runs the same program from what was bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx
import torch

from pipeline.engine.description import PluginDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError
from pipeline.network.program import Program
from pipeline.network.spec import Lowering
from pipeline.runtime import launches
from pipeline.runtime.engine_runner import EngineRunner
from pipeline.runtime.errors import RunnerError
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import Request
from pipeline.runtime.runner import InterpreterRunner, Runner
from pipeline.runtime.sampling import Sampling
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.network import models
from tests.runtime import stand_in
from tests.runtime.stand_in import HostDevice, StandIn

BLOCKS = 40
LIMITS = BuildLimits(
    max_seq_len=128,
    max_batch_size=6,
    max_num_tokens=24,
    generation=(Rectangle(batch=6, length=32), Rectangle(batch=3, length=128)),
    block_size=8,
    max_blocks=60,
)


@dataclass
class Engine:
    """What an engine file would be: the network, its description, the file."""

    model: models.Model
    program: Program
    path: Path

    def load(
        self,
        device: HostDevice | None = None,
        *,
        rtx: bool = True,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> EngineRunner:
        device = device or HostDevice()
        description = stand_in.describe(self.model, LIMITS, **(changes or {}))
        module = StandIn(self.program, description, device, rtx=rtx)
        return EngineRunner(self.path, description, trt=module, device=device, **options)


@pytest.fixture(scope="module", params=[fixtures.llama, fixtures.deepseek_v2], ids=["llama", "deepseek_v2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make(fixtures.llama, tmp_path_factory.mktemp("llama"))


def make(write: Callable[..., Path], folder: Path) -> Engine:
    model = models.load(write(folder / "m", dtype="float32", num_hidden_layers=2))
    (folder / "model.engine").write_bytes(b"engine")
    return Engine(model, model.program(max_seq_len=128), folder / "model.engine")


def plan(chunks: list[tuple[list[int], int, list[int]]], logits: str = "last") -> dict[str, Any]:
    made = [Chunk(tokens=tokens, start=start, block_table=table, logits=logits) for tokens, start, table in chunks]
    return plan_step(made, block_size=8, num_blocks=BLOCKS).inputs


def module_of(runner: EngineRunner) -> StandIn:
    module: StandIn = runner._loaded._trt
    return module


def prefill(runner: Runner, rng: random.Random, count: int) -> list[tuple[list[int], int, list[int]]]:
    """So many sequences of random lengths in the pools → the step that follows."""
    blocks = rng.sample(range(1, BLOCKS), 4 * count)
    steps = []
    for index in range(count):
        table, length = blocks[4 * index : 4 * index + 4], rng.randrange(9, 16)
        runner.step(plan([(rng.choices(range(2, 512), k=length), 0, table)]))
        steps.append(([rng.randrange(2, 512)], length, table))
    return steps


@pytest.mark.parametrize("rtx", [True, False], ids=["rtx", "tensorrt"])
def test_steps_are_the_interpreters(engine: Engine, rtx: bool) -> None:
    """Bit for bit: context and generation steps, in mixed order, padded or not, through graphs and before."""
    expected, runner = InterpreterRunner(engine.program, mode="exact"), engine.load(rtx=rtx)
    for one in (expected, runner):
        one.allocate(BLOCKS)
    rng = random.Random(3)
    free = rng.sample(range(1, BLOCKS), BLOCKS - 1)
    sizes = [16, 4, 4, 4, 4, 4]
    tables = [[free.pop() for _ in range(size)] for size in sizes]
    lengths = [0] * 6
    for number in range(36):
        picked = [0] if number < 3 else rng.sample(range(6), rng.randrange(1, 4)) if number % 2 else list(range(1, 6))
        new = [1] * len(picked)
        if number < 3 or rng.random() < 0.3:  # a context step, of up to three sequences
            picked = picked[:3]
            new = [16 if number < 3 else rng.randrange(1, 6) for _ in picked]
        new = [min(n, 8 * sizes[i] - lengths[i]) for i, n in zip(picked, new, strict=True)]
        work = [(i, n) for i, n in zip(picked, new, strict=True) if n]
        inputs = plan([(rng.choices(range(2, 512), k=n), lengths[i], tables[i]) for i, n in work])
        assert torch.equal(runner.step(inputs), expected.step(inputs))
        for i, n in work:
            lengths[i] += n
    for name, pool in expected.read_blocks(range(1, BLOCKS)).items():
        assert torch.equal(runner.read_blocks(range(1, BLOCKS))[name], pool)
    assert {context.profile for context in module_of(runner).contexts if context.runs} == {0, 1, 2}


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("rtx", [True, False], ids=["rtx", "tensorrt"])
def test_requests_are_answered_as_by_the_interpreter(engine: Engine, rtx: bool, policy: Policy) -> None:
    rng = random.Random(5)
    beginning = rng.choices(range(2, 512), k=18)
    requests = [
        Request(
            input_ids=(*beginning[: rng.choice([0, 9, 18])], *rng.choices(range(2, 512), k=rng.randrange(1, 9))),
            max_tokens=rng.randrange(4, 14),
            sampling=Sampling() if n % 2 else Sampling(top_k=20, temperature=0.8, seed=n),
            num_return_sequences=1 + n % 2 if n != 3 else 1,
            return_context_log_probs=n == 2,
        )
        for n in range(7)
    ]
    answers = []
    for runner in (InterpreterRunner(engine.program, mode="exact"), engine.load(rtx=rtx)):
        settings = ExecutorSettings(policy=policy)
        executor = Executor(runner, Limits.of_engine(LIMITS, 20), vocab_size=512, settings=settings)
        handles = [executor.submit(request) for request in requests]
        while executor.step() or executor.batcher.answers.live:
            executor.check()
        results = [handle.result(0) for handle in handles]
        answers.append([[output.tokens for output in result.outputs] for result in results])
        assert results[2].context_log_probs is not None
        assert len(results[2].context_log_probs) == len(requests[2].input_ids) - 1
    assert answers[0] == answers[1]


def test_more_logits_than_a_step_gives_come_in_parts(engine: Engine) -> None:
    expected, runner = InterpreterRunner(engine.program, mode="exact"), engine.load()
    for one in (expected, runner):
        one.allocate(BLOCKS)
    inputs = plan([([*range(5, 15)], 0, [3, 1])], logits="all")
    most = max(profile.most["N"] for profile in runner.profiles if profile.phase == "context")
    assert most < 10
    assert torch.equal(runner.step(inputs), expected.step(inputs))
    assert all(map(torch.equal, runner.pools.values(), expected.pools.values()))


def test_graphs_are_captured_once_per_size(llama: Engine) -> None:
    device = HostDevice()
    runner = llama.load(device, rtx=False)
    runner.allocate(BLOCKS)
    steps = prefill(runner, random.Random(1), 6)
    assert device.captures == 0  # prompts are not worth a graph, their sizes hardly come again
    for batch in (1, 1, 2, 4, 5, 6, 5, 2):
        runner.step(plan(steps[:batch]))
    # Five run as six, and all with two columns of the block table.
    assert runner._launches is not None
    assert [key[1][0] for key in runner._launches.graphs] == [(1,), (4,), (6,), (2,)]  # by last use
    assert (device.captures, device.replays) == (4, 4)
    assert len(module_of(runner).contexts) == 1 + 4  # one for context steps, one for each graph
    assert len({context.memory for context in module_of(runner).contexts}) == 1


def test_tensorrt_rtx_captures_by_itself(llama: Engine) -> None:
    device = HostDevice()
    runner = llama.load(device)
    runner.allocate(BLOCKS)
    runner.step(plan(prefill(runner, random.Random(1), 3)))
    assert device.captures == 0
    configs = [context.config for context in module_of(runner).contexts]
    graphs, kernels = tensorrt_rtx.CudaGraphStrategy, tensorrt_rtx.DynamicShapesKernelSpecializationStrategy
    assert [config.cuda_graph_strategy for config in configs] == [graphs.DISABLED, *[graphs.WHOLE_GRAPH_CAPTURE] * 2]
    found = [config.dynamic_shapes_kernel_specialization_strategy for config in configs]
    assert found == [kernels.NONE, kernels.LAZY, kernels.LAZY]


@pytest.mark.parametrize("rtx", [True, False], ids=["rtx", "tensorrt"])
def test_an_engine_whose_plugins_exchange_rows_is_never_captured(llama: Engine, rtx: bool) -> None:
    device = HostDevice()
    plugins = (PluginDescription(operation="moe_combine", layers=2, kernels=()),)
    runner = llama.load(device, rtx=rtx, changes={"plugins": plugins})
    runner.allocate(BLOCKS)
    runner.step(plan(prefill(runner, random.Random(1), 3)))
    assert device.captures == 0
    contexts = module_of(runner).contexts
    assert len(contexts) == 3
    if rtx:
        assert {context.config.cuda_graph_strategy for context in contexts} == {tensorrt_rtx.CudaGraphStrategy.DISABLED}


@pytest.mark.parametrize("rtx", [True, False], ids=["rtx", "tensorrt"])
def test_every_context_of_a_rank_has_the_communicator(llama: Engine, rtx: bool) -> None:
    """And none is captured: its ranks would have to be together."""
    runner = llama.load(rtx=rtx, communicator=4711)
    runner.allocate(BLOCKS)
    for _ in range(2):
        runner.step(plan([([5], 3, [1])]))
    contexts = module_of(runner).contexts
    assert contexts and {context.communicator for context in contexts} == {4711}
    assert runner.device.captures == 0
    alone = llama.load(rtx=rtx)
    alone.allocate(BLOCKS)
    assert {context.communicator for context in module_of(alone).contexts} <= {None}


def test_a_communicator_that_tensorrt_does_not_take(llama: Engine) -> None:
    runner = llama.load(communicator=4711)
    module_of(runner).broken.add("set_communicator")
    with pytest.raises(RunnerError, match="takes no communicator: NCCL is not found"):
        runner.allocate(BLOCKS)


def test_graphs_can_be_left_out(llama: Engine) -> None:
    device = HostDevice()
    runner = llama.load(device, rtx=False, graphs=False)
    runner.allocate(BLOCKS)
    steps = prefill(runner, random.Random(1), 3)
    for _ in range(2):
        runner.step(plan(steps))
    assert device.captures == 0 and len(module_of(runner).contexts) == 3


def test_graphs_that_are_not_used_make_room(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches.Launches.__init__, "__kwdefaults__", {"most_graphs": 2})
    device = HostDevice()
    runner = llama.load(device, rtx=False)
    runner.allocate(BLOCKS)
    steps = prefill(runner, random.Random(1), 3)
    for batch in (1, 2, 1, 3, 1, 2):
        runner.step(plan(steps[:batch]))
    assert (device.captures, device.replays) == (4, 2)  # 3 took the place of 2, and 2 that of 3


def test_pools_keep_their_address_when_they_are_emptied(llama: Engine) -> None:
    device = HostDevice()
    runner = llama.load(device, rtx=False)
    runner.allocate(BLOCKS)
    steps = prefill(runner, random.Random(1), 2)
    runner.step(plan(steps))
    before = [pool.data_ptr() for pool in runner.pools.values()]
    runner.allocate(BLOCKS)
    assert [pool.data_ptr() for pool in runner.pools.values()] == before
    assert not any(pool.any() for pool in runner.pools.values())
    runner.step(plan(steps))
    assert (device.captures, device.replays) == (1, 1)


def test_another_number_of_blocks_binds_anew(llama: Engine) -> None:
    expected, runner = InterpreterRunner(llama.program, mode="exact"), llama.load(rtx=False)
    for one in (expected, runner):
        one.allocate(20)
        one.allocate(BLOCKS)
        assert len(one.pools["k_pool_0"]) == BLOCKS
    step = ([5], 0, [BLOCKS - 1])
    for _ in range(2):
        assert torch.equal(runner.step(plan([step])), expected.step(plan([step])))


def test_logits_are_the_callers_own(llama: Engine) -> None:
    runner = llama.load()
    runner.allocate(BLOCKS)
    first = runner.step(plan([([5], 0, [1])]))
    kept = first.clone()
    runner.step(plan([([9], 0, [2])]))
    assert torch.equal(first, kept)


def test_memory_is_what_it_says(llama: Engine) -> None:
    """Nothing is allocated by a step, and what is allocated before fits what was counted."""
    device = HostDevice(free=600_000)
    runner = llama.load(device)
    free = device.memory()[0]
    blocks = runner.count_blocks(0.8)
    assert blocks == int(0.8 * free) // runner.block_bytes == int(0.8 * free) // (2 * 2 * 2 * 8 * 32 * 4)
    runner.allocate(BLOCKS)
    after = device.memory()[0]
    runner.step(plan(prefill(runner, random.Random(1), 3)))
    assert device.memory()[0] == after < free - BLOCKS * runner.block_bytes


def test_all_free_memory_holds_no_more_blocks_than_the_engine_takes(llama: Engine) -> None:
    assert llama.load().count_blocks(0.9) == LIMITS.max_blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "stripped"}, "built without its weights"),
        ({"sm": 86}, "is for SM86, and a stand-in is SM80"),
        ({"backend_version": "1.6.0.1"}, "built by tensorrt_rtx 1.6.0.1; .* is installed"),
        (
            {"weights_bytes": 2 << 30},
            r"weights and workspace, needs 2.15 GB of a stand-in's memory: 1.07 GB of 1.07 GB",
        ),
        ({"outputs": ()}, "gives no logits"),
    ],
)
def test_engines_that_cannot_run_here_are_refused(llama: Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompatibilityError, match=message):
        llama.load(changes=changes)


def test_an_engine_that_is_not_valid_here_says_why(llama: Engine) -> None:
    device = HostDevice()
    description = stand_in.describe(llama.model, LIMITS)
    module = StandIn(llama.program, description, device, rtx=True)
    reasons = tensorrt_rtx.EngineInvalidityDiagnostics
    module.validity = (tensorrt_rtx.EngineValidity.INVALID, int(reasons.UNSUPPORTED_CC) | int(reasons.OLD_CUDA_DRIVER))
    with pytest.raises(CompatibilityError, match="not valid here: unsupported cc, old cuda driver"):
        EngineRunner(llama.path, description, trt=module, device=device)


def test_a_damaged_engine_is_refused_with_tensorrts_words(llama: Engine, tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"nonsense")
    with pytest.raises(CompatibilityError, match="cannot be loaded on a stand-in: Serialization assertion failed"):
        replace(llama, path=path).load()
    path.write_bytes(b"")
    with pytest.raises(CompatibilityError, match="cannot be read"):
        replace(llama, path=path).load()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: {"inputs": d.inputs[1:]}, "inputs and outputs differ: input_ids"),
        (lambda d: {"profiles": d.profiles[:2]}, "it has 3 profiles, not 2"),
        (
            lambda d: {"profiles": (d.profiles[0], replace(d.profiles[2], name="other"), d.profiles[2])},
            "has other sizes in profile other",
        ),
    ],
)
def test_another_engine_than_described_is_refused(llama: Engine, edit: Any, message: str) -> None:
    device = HostDevice()
    description = stand_in.describe(llama.model, LIMITS)
    module = StandIn(llama.program, description, device, rtx=True)
    with pytest.raises(CompatibilityError, match=message):
        EngineRunner(llama.path, replace(description, **edit(description)), trt=module, device=device)


@pytest.mark.parametrize("lowering", [Lowering(), Lowering(rope_paged_kv="plugin")])
def test_plugins_are_known_before_an_engine_that_has_them_is_loaded(
    llama: Engine, lowering: Lowering, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Any] = []
    loaded = stand_in.PlainRuntime.deserialize_cuda_engine

    def deserialize(runtime: Any, data: Any) -> Any:
        assert bool(known) == bool(lowering.plugins())
        return loaded(runtime, data)

    monkeypatch.setattr("plugins.tensorrt_plugin.register_plugins", known.append)
    monkeypatch.setattr(stand_in.PlainRuntime, "deserialize_cuda_engine", deserialize)
    runner = llama.load(changes={"spec": llama.model.spec(lowering=lowering)})
    assert known == ([module_of(runner)] if lowering.plugins() else [])


def test_weights_can_stay_in_host_memory(llama: Engine) -> None:
    runner = llama.load(changes={"weight_streaming": True}, weights_fraction=0.25)
    assert runner._loaded._engine.weight_streaming_budget_v2 == 1000
    whole = llama.load(changes={"weight_streaming": True})
    assert whole._loaded._engine.weight_streaming_budget_v2 == 4000
    with pytest.raises(CompatibilityError, match="cannot leave weights in host memory"):
        llama.load(weights_fraction=0.5)
    with pytest.raises(CompatibilityError, match="weights_fraction is 2"):
        llama.load(weights_fraction=2)


def test_short_memory_is_told_in_numbers(llama: Engine) -> None:
    with pytest.raises(CompatibilityError, match=r"the workspace of model.engine needs 4.10 kB .* 4.00 kB of 4.00 kB"):
        llama.load(HostDevice(free=4000), changes={"weights_bytes": None})
    device = HostDevice(free=204_096)
    runner = llama.load(device)
    with pytest.raises(
        CompatibilityError, match=r"50% of the 200000 bytes .* hold 12 KV blocks of 8192 bytes.* needs 17"
    ):
        runner.count_blocks(0.5)
    with pytest.raises(CompatibilityError, match=r"v_pool_0, one of 4 pools of 60 KV blocks, needs 122.88 kB"):
        runner.allocate(60)
    runner.allocate(17)  # what failed left nothing behind
    runner.step(plan_step([Chunk(tokens=[5], start=0, block_table=[1])], block_size=8, num_blocks=17).inputs)


@pytest.mark.parametrize("blocks", [1, 61])
def test_only_as_many_blocks_as_the_engine_takes(llama: Engine, blocks: int) -> None:
    with pytest.raises(CompatibilityError, match=f"{blocks} blocks: .* takes up to 60"):
        llama.load().allocate(blocks)


def test_steps_over_other_blocks_are_refused(llama: Engine) -> None:
    runner = llama.load()
    with pytest.raises(CompatibilityError, match="a step over 40 blocks, and 0 are allocated"):
        runner.step(plan([([5], 0, [1])]))
    runner.allocate(20)
    with pytest.raises(CompatibilityError, match="a step over 40 blocks, and 20 are allocated"):
        runner.step(plan([([5], 0, [1])]))


@pytest.mark.parametrize("rtx", [True, False], ids=["rtx", "tensorrt"])
def test_what_tensorrt_fails_is_told_in_its_words(llama: Engine, rtx: bool) -> None:
    runner = llama.load(rtx=rtx)
    runner.allocate(BLOCKS)
    step = plan([([5], 0, [1])])
    expected = runner.step(step)
    module_of(runner).broken = {"execute_async_v3"}
    with pytest.raises(RunnerError, match="failed to run a step: an illegal memory access"):
        runner.step(plan([([5, 6], 0, [1])]))
    module_of(runner).broken = {"create_execution_context"}
    with pytest.raises(CompatibilityError, match="no execution context for profile 0: out of memory"):
        runner.allocate(20)
    module_of(runner).broken = set()
    runner.allocate(BLOCKS)
    assert torch.equal(runner.step(step), expected)


def test_the_stand_in_calls_nothing_that_tensorrt_does_not_have() -> None:
    pairs = {
        stand_in.Runtime: tensorrt_rtx.Runtime,
        stand_in.CudaEngine: tensorrt_rtx.ICudaEngine,
        stand_in.RuntimeConfig: tensorrt_rtx.IRuntimeConfig,
        stand_in.ExecutionContext: tensorrt_rtx.IExecutionContext,
    }
    own = {"run", "strategy"}
    for played, real in pairs.items():
        names = {name for name in vars(played) if not name.startswith("_")} - own
        assert names and all(hasattr(real, name) for name in names)
