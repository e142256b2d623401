"""Native kernels as one call: the same bits as one by one, whatever came before; nothing held that others let go."""

import gc
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter import compiler, tape
from pipeline.interpreter.errors import ExecutionError
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import packed, page_calls, rotation
from pipeline.interpreter.plan import Plan, Step, Values
from pipeline.interpreter.tape import Layout, Tape
from pipeline.network import inputs as ports
from pipeline.network.program import Program
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from tests.interpreter.networks import feed, read
from tests.interpreter.trained import NAMES, quantize_trained, read_held_out

BLOCK, BLOCKS = 8, 40


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return quantize_trained(request.param, tmp_path_factory.mktemp("tape"), block_size=BLOCK)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return quantize_trained("deepseek-coder-tiny", tmp_path_factory.mktemp("llama"), block_size=BLOCK)


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(steps: Iterable[Step], *_: Any) -> Iterable[Step]:
        return steps

    monkeypatch.setattr(compiler, "join_native", keep)


def tapes(interpreter: Interpreter) -> list[Tape]:
    plan: Plan = interpreter._plan(frozenset())
    return [step for step in plan.steps if isinstance(step, Tape)]


def step(runner: InterpreterRunner, tokens: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """One token of each sequence; blocks in no order."""
    chunks = [
        Chunk(
            tokens=[token], start=start, block_table=[1 + (7 * i + 3 * j) % (BLOCKS - 1) for j in range(1 + start // 8)]
        )
        for i, (token, start) in enumerate(zip(tokens, starts, strict=True))
    ]
    return runner.step(plan_step(chunks, block_size=BLOCK, num_blocks=BLOCKS).inputs)


def decode(runner: InterpreterRunner, text: list[int]) -> list[torch.Tensor]:
    """Batches of one to three, in turn, over the borders of blocks."""
    results = []
    for start in range(20):
        for batch in (1, 3, 1, 2):
            tokens = text[start * 3 : start * 3 + batch]
            results.append(step(runner, tokens, [start, start // 2, 0][:batch]))
    return results


def test_they_compute_what_the_kernels_do_one_by_one(trained: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [token % 2048 for token in read_held_out("deepseek-coder-tiny", 64)]
    runner = InterpreterRunner(trained, mode="fast")
    runner.allocate(BLOCKS)
    assert max(len(found.layers) for found in tapes(runner.interpreter)) > 1
    together = decode(runner, text)
    apart(monkeypatch)
    runner = InterpreterRunner(trained, mode="fast")
    runner.allocate(BLOCKS)
    assert not tapes(runner.interpreter)
    assert all(torch.equal(*pair) for pair in zip(together, decode(runner, text), strict=True))


@pytest.mark.parametrize("threads", [1, 5])
def test_the_number_of_threads_changes_nothing(llama: Program, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        runner = InterpreterRunner(llama, mode="fast")
        runner.allocate(BLOCKS)
        return decode(runner, text)

    text = [token % 2048 for token in read_held_out("deepseek-coder-tiny", 64)]
    expected = run()
    for module in (page_calls, packed, rotation):
        monkeypatch.setattr(module, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(*pair) for pair in zip(run(), expected, strict=True))


def test_a_form_that_came_before_is_not_laid_out_again(llama: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = InterpreterRunner(llama, mode="fast")
    runner.allocate(BLOCKS)
    longest = max(tapes(runner.interpreter), key=lambda found: len(found.layers))
    made: list[Layout | None] = []

    def lay_out(values: Values) -> Layout | None:
        made.append(Tape._lay_out(longest, values))
        return made[-1]

    monkeypatch.setattr(longest, "_lay_out", lay_out)
    counts = []
    for start in range(2 * BLOCK):
        step(runner, [5], [start])
        counts.append(len(made))
    assert counts == [1] * BLOCK + [2] * BLOCK  # a longer block table is another form
    for batch in (1, 2, 3, 4, 5, 1):
        step(runner, [5] * batch, [0] * batch)
    assert len(made) == len(longest._layouts) == 6
    monkeypatch.setattr(tape, "MOST_LAYOUTS", 6)
    step(runner, [5] * 6, [0] * 6)
    assert len(made) == 7 and len(longest._layouts) == 6
    step(runner, [5] * 3, [0] * 3)
    assert len(made) == 7  # the form that was asked for longest ago is the one that went


def test_caches_that_are_given_up_are_let_go(llama: Program) -> None:
    runner = InterpreterRunner(llama, mode="fast")
    runner.allocate(BLOCKS)
    step(runner, [5], [0])
    pools = [weakref.ref(pool) for pool in runner.pools.values()]
    layouts = [layout for found in tapes(runner.interpreter) for layout in found._layouts.values()]
    assert pools and any(layouts)
    runner.allocate(BLOCKS)
    gc.collect()
    assert [pool() for pool in pools] == [None] * len(pools)


def test_what_it_returns_is_not_written_over(llama: Program) -> None:
    runner = InterpreterRunner(llama, mode="fast")
    runner.allocate(BLOCKS)
    first = step(runner, [5], [0])
    kept = first.clone()
    assert not torch.equal(step(runner, [6], [1]), kept)
    assert torch.equal(first, kept)


def norms(g: Any) -> dict[str, Any]:
    x = feed(g, "x", "float32", (-1, 64))
    outputs = {}
    for layer in ("one", "two"):
        mean = g.reduce(f"{layer}.mean", g.product(f"{layer}.square", x, x), "AVG", 1, keep=True)
        variance = g.sum(f"{layer}.variance", mean, g.number(f"{layer}.eps", [[1e-3]], "float32"))
        ratio = g.elementwise(f"{layer}.ratio", x, g.unary(f"{layer}.root", variance, "SQRT"), "DIV")
        weight = g.constant(f"{layer}.weight", RawTensor.from_torch(torch.linspace(0.5, 2, 64)[None]))
        outputs[layer] = x = g.product(layer, ratio, weight)
    return outputs


@pytest.mark.parametrize("limit", ["MOST_COPIED", "ARENA"])
def test_what_is_too_large_to_copy_or_to_hold(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are then read where they lie, in whatever strides; or nothing is laid out."""
    monkeypatch.setattr(tape, limit, 0)
    program = read(norms)
    joined = Interpreter(program, mode="fast")
    (found,) = tapes(joined)
    wide = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    inputs = [wide[:, :64], wide[:1, 64:], wide[:, :64], wide[:, 64:], wide[:, :64].contiguous()]
    results = [joined.run({"x": x}) for x in inputs]
    assert (len(found._layouts) > 1, len(found._others) > 1) == (limit == "MOST_COPIED", limit == "ARENA")
    apart(monkeypatch)
    alone = Interpreter(program, mode="fast")
    for x, result in zip(inputs, results, strict=True):
        expected = alone.run({"x": x})
        assert all(torch.equal(result[name], expected[name]) for name in ("one", "two"))


def test_a_view_of_what_is_read_where_it_lies_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That memory is another at every step: each would be a layout, and would stay as long."""
    monkeypatch.setattr(tape, "MOST_COPIED", 0)

    def network(g: Any) -> dict[str, Any]:
        found = norms(g)
        whole = feed(g, "whole", "float32", (3, 64))
        part = g.network.add_slice(whole, (1, 0), (1, 64), (1, 1))
        part.name = "part"
        return {"one": found["one"], "part": part.get_output(0)}

    joined = Interpreter(read(network), mode="fast")
    for seed in range(3):
        x, whole = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed))
        result, kept = joined.run({"x": x, "whole": whole}), weakref.ref(whole)
        assert torch.equal(result["part"], whole[1:2])
        del whole, result
        gc.collect()
        assert kept() is None
    assert not any(found._layouts for found in tapes(joined))


def test_what_cannot_be_laid_out_names_the_layer(llama: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = InterpreterRunner(llama, mode="fast")
    (first, *_) = tapes(runner.interpreter)
    position = len(first._steps) // 2
    step, kernel = first._steps[position]

    def fail(*_: Any) -> Any:
        raise RuntimeError("shape '[3, 5]' is invalid")

    steps = [*first._steps[:position], (step, replace(kernel, plan=fail)), *first._steps[position + 1 :]]
    monkeypatch.setattr(first, "_steps", tuple(steps))
    runner.allocate(BLOCKS)
    plan = plan_step([Chunk(tokens=[5], start=0, block_table=[1])], block_size=BLOCK, num_blocks=BLOCKS)
    with pytest.raises(ExecutionError, match=f"layer {re.escape(step.layers[-1])}: shape"):
        runner.step(plan.inputs)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_refusal_names_the_layer(llama: Program, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again: threads must agree where they stop."""
    monkeypatch.setattr(page_calls, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    runner = InterpreterRunner(llama, mode="fast")
    runner.allocate(BLOCKS)
    plan = plan_step([Chunk(tokens=[5], start=0, block_table=[1])], block_size=BLOCK, num_blocks=BLOCKS)
    plan.inputs[ports.BLOCK_TABLES.name][:] = BLOCKS
    for _ in range(200):
        with pytest.raises(ExecutionError, match=rf"layers\.0\.attention.*none of the {BLOCKS} of the cache"):
            runner.step(plan.inputs)
