"""Routed experts in INT4 as one call in C: what the products of packed.py give, one expert after the other."""

import math
from typing import Any

import pytest
import torch

from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.native.kernel import NativeKernel
from pipeline.interpreter.operations import native_experts, packed
from pipeline.interpreter.plan import Step
from pipeline.interpreter.tape import Tape
from tests.interpreter.test_experts import E, H, choose, draw, network


def run(rows: int, prescales: int, *, x: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> Any:
    interpreter = Interpreter(network("float16", int4=True, prescales=prescales), mode="fast")
    (kernel,) = (
        step.kernel
        for tape in interpreter._plan(frozenset()).steps
        for step in (tape._alone if isinstance(tape, Tape) else [tape])
        if isinstance(step, Step) and isinstance(step.kernel, NativeKernel) and not step.kernel.shares
    )
    assert kernel.plan.__qualname__.startswith("compile_native")
    held = interpreter.numerics.held("float16")
    x = draw(rows, H, seed=9) if x is None else x
    weights = choose(rows, among=range(E)) if weights is None else weights
    return interpreter.run({"x": x.to(held), "weights": weights})["y"]


@pytest.mark.parametrize(("rows", "fewest"), [(1, 33), (3, 33), (32, 33), (40, 1)])
@pytest.mark.parametrize("prescales", [0, 1, E])
def test_it_is_what_the_experts_are_one_by_one(
    rows: int, fewest: int, prescales: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows all experts' inputs are of 8 bits, those of an expert with few rows too: one by one with `fewest`
    alone."""
    monkeypatch.setattr(packed, "FEWEST_SHORT", fewest)
    found = run(rows, prescales)
    apart: list[Any] = []

    def leave(*arguments: Any) -> Any:
        apart.append(arguments[-1])
        return arguments[-1]

    monkeypatch.setattr("pipeline.interpreter.operations.experts.compile_native", leave)
    interpreter = Interpreter(network("float16", int4=True, prescales=prescales), mode="fast")
    held = interpreter.numerics.held("float16")
    inputs = {"x": draw(rows, H, seed=9).to(held), "weights": choose(rows, among=range(E))}
    expected = interpreter.run(inputs)["y"]
    assert len(apart) == 1 and found.dtype is torch.float32
    bound = 1e-5 if held is torch.float32 else 2**-6
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(12, E)
    for module in (native_experts, packed):
        monkeypatch.setattr(module, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(5):
        assert torch.equal(run(12, E), alone)


def test_nan_stays_in_its_row() -> None:
    x, weights = draw(7, H, seed=9), choose(7, among=range(E))
    alone = run(7, 0)
    x[3, 5] = math.nan
    weights[2, 6] = math.nan
    y = run(7, 0, x=x, weights=weights)
    assert y[3].isnan().all() and y[6].isnan().all()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(y[others], alone[others])


def test_rows_that_chose_nobody_are_zero() -> None:
    weights = choose(5, among=range(E))
    weights[:, 2] = 0
    y = run(5, 1, weights=weights)
    assert not y[2].any() and bool(y[[0, 1, 3, 4]].any(1).all())
    assert not run(5, 1, weights=torch.zeros(E, 5, 1)).any()
