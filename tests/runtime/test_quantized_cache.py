"""Serving over pools in INT8 and FP8: a byte a value, moved as it is, and each request the tokens that it has alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.layouts.scales import cache_scale
from pipeline.checkpoint.tensors import RawTensor
from pipeline.network.spec import Lowering
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import Request
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.network import models
from tests.runtime import stand_in
from tests.runtime.runners import LIMITS

PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
KINDS = {"fp8": (fixtures.llama, torch.float8_e4m3fn, 448), "int8": (fixtures.deepseek_v2, torch.int8, 127)}
BLOCK, BEGINNING = 8, random.Random(1).choices(range(2, 500), k=19)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    write, _, largest = KINDS[kind]
    model = models.load(write(tmp_path_factory.mktemp(kind) / "m", num_hidden_layers=2, dtype="float32"))
    for layer in range(2):
        model.source.raw[cache_scale(layer)] = RawTensor.from_torch(torch.tensor([4.0 / largest]))
    return model


@pytest.fixture(scope="module")
def runner(model: models.Model, kind: str) -> InterpreterRunner:
    return InterpreterRunner(model.program(lowering=PLUGINS, kv_cache=kind), mode="exact")


def step(runner: InterpreterRunner, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
    chunk = Chunk(tokens=tokens, start=start, block_table=table, logits="last")
    return runner.step(plan_step([chunk], block_size=BLOCK, num_blocks=5).inputs)[0]


def test_a_value_takes_a_byte(runner: InterpreterRunner, kind: str) -> None:
    runner.allocate(5)
    for pool in runner.pools.values():
        assert pool.dtype == KINDS[kind][1] and pool.nbytes == pool.numel()


@pytest.fixture(params=["interpreter", "engine"])
def either(
    request: pytest.FixtureRequest,
    runner: InterpreterRunner,
    model: models.Model,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    runner.allocate(5)
    if request.param == "interpreter":
        return runner
    monkeypatch.setattr("plugins.tensorrt_plugin.register_plugins", lambda _: None)  # there is no registry
    options: dict[str, Any] = {"lowering": PLUGINS, "kv_cache": kind}
    program = model.program(max_seq_len=LIMITS.max_seq_len, **options)
    made = stand_in.load(model, program, LIMITS, tmp_path, **options)
    assert made.block_bytes == sum(block.nbytes for block in runner.read_blocks([1]).values())
    return made


def test_blocks_are_copied_carried_and_zeroed(either: Any) -> None:
    runner = either
    runner.allocate(5)
    step(runner, list(range(5, 15)), 0, [3, 1])
    content = runner.read_blocks([3, 1])
    runner.copy_blocks([(3, 2), (1, 4)])
    wanted = step(runner, [9], 10, [3, 1])
    assert torch.equal(step(runner, [9], 10, [2, 4]), wanted)
    runner.zero_blocks([1, 2, 3, 4])
    assert not any(pool.float().any() for pool in runner.read_blocks(range(5)).values())
    runner.write_blocks([4, 2], content)
    assert torch.equal(step(runner, [9], 10, [4, 2]), wanted)


def answer(runner: InterpreterRunner, requests: list[Request], **changes: Any) -> list[list[torch.Tensor]]:
    """The logits of every token of each request, served together."""
    sizes: dict[str, Any] = {"num_blocks": 60, "max_num_tokens": 64, "reuse": True} | changes
    settings = ExecutorSettings(policy=Policy.MAX_UTILIZATION, reuse_blocks=sizes.pop("reuse"))
    limits = Limits(block_size=BLOCK, max_seq_len=64, max_batch_size=4, **sizes)
    executor = Executor(runner, limits, vocab_size=512, settings=settings)
    handles = [executor.submit(request) for request in requests]
    while executor.step() or executor.batcher.answers.live:
        executor.check()
    return [list(handle.result(0).outputs[0].generation_logits) for handle in handles]


def test_together_as_alone_to_the_last_bit(runner: InterpreterRunner) -> None:
    """Rows are rounded each by itself, so neither company nor chunks, a shared beginning or a pause can show."""
    rng = random.Random(2)
    requests = [
        Request(
            input_ids=(*BEGINNING[:shared], *rng.choices(range(2, 500), k=rng.randrange(2, 12))),
            max_tokens=rng.randrange(4, 9),
            end_id=-1,
            return_generation_logits=True,
        )
        for shared in (0, 8, 19, 16)
    ]
    alone = [answer(runner, [request], reuse=False)[0] for request in requests]
    for changes in ({}, {"max_num_tokens": 9, "max_chunk": 5}, {"num_blocks": 9}):
        for one, together in zip(alone, answer(runner, requests, **changes), strict=True):
            assert len(one) == len(together) and all(map(torch.equal, one, together))
