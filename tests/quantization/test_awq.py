"""AWQ's search on planted problems, and never worse than rounding to nearest on any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.quantization import awq, int4, rtn
from pipeline.quantization.capture import Inputs
from pipeline.quantization.int4_grids import Grid, asymmetric, symmetric
from pipeline.quantization.problem import PLAIN, Problem
from pipeline.quantization.rules import Linear


def make_problem(
    weights: dict[str, torch.Tensor],
    rows: torch.Tensor,
    *,
    clip: bool = False,
    group: int = 64,
    grid: Grid = symmetric,
    realise: Callable[[torch.Tensor], torch.Tensor | None] = lambda s: s,
) -> Problem:
    linears = tuple(
        Linear(name=name, role="mlp", layer=0, expert=None, shape=tuple(w.shape), method="awq", group=group)
        for name, w in weights.items()
    )
    inputs = Inputs(rows.abs().mean(0), rows.abs().amax(0), rows, rows.shape[0])
    return Problem(
        name="x",
        linears=linears,
        read=weights.__getitem__,
        mean_abs=inputs.mean_abs,
        max_abs=inputs.max_abs,
        inputs=dict.fromkeys(weights, inputs),
        realise=realise,
        scale_dtype=torch.float32,
        clip=clip,
        grid=grid,
    )


def planted(seed: int, outliers: int = 4) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights, and inputs of which a few channels are 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(96, 128, generator=generator)
    rows[:, torch.randperm(128, generator=generator)[:outliers]] *= 30
    return {name: torch.randn(48, 128, generator=generator) for name in ("fc", "gate")}, rows


def true_error(
    weight: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    limits: torch.Tensor | None,
    grid: Grid = symmetric,
) -> float:
    """Relative squared output error through the packed tensors, as an engine would compute it."""
    s = torch.ones(weight.shape[1]) if scale is None else scale
    quantize = int4.quantize_packed if grid is symmetric else int4.quantize_with_zeros
    wanted = rows @ weight.T
    found = (rows / s) @ int4.dequantize(*quantize(weight * s, 64, limits=limits)).T
    return float((found - wanted).square().sum() / wanted.square().sum())


@pytest.mark.parametrize("grid", [symmetric, asymmetric])
def test_wins_clearly_on_planted_outliers(grid: Grid) -> None:
    weights, rows = planted(0)
    choice = awq.choose(make_problem(weights, rows, grid=grid))
    assert choice.alpha is not None and choice.alpha > 0.1 and choice.scale is not None
    for name, weight in weights.items():
        before, after = (true_error(weight, rows, scale, None, grid) for scale in (None, choice.scale))
        assert choice.losses[name].before == pytest.approx(before, rel=1e-3)
        assert choice.losses[name].after == pytest.approx(after, rel=1e-3)
        assert after < 0.5 * before
    loud = rows.abs().mean(0).topk(4).indices
    assert choice.scale[loud].min() > 1 > choice.scale.median()


@given(st.integers(0, 2**32 - 1), st.integers(0, 8), st.booleans(), st.sampled_from((symmetric, asymmetric)))
@settings(max_examples=25, deadline=None)
def test_never_worse_than_rounding_to_nearest(seed: int, outliers: int, clip: bool, grid: Grid) -> None:
    weights, rows = planted(seed, outliers)
    choice = awq.choose(make_problem(weights, rows, clip=clip, grid=grid))
    before, after = (
        sum(true_error(w, rows, scale, treatments.get(name, PLAIN).limits, grid) for name, w in weights.items())
        for scale, treatments in ((None, {}), (choice.scale, choice.treatments))
    )
    assert after <= before * (1 + 1e-4)  # in float32, by another order of sums


@pytest.mark.parametrize("grid", [symmetric, asymmetric])
def test_clipping_pays_for_heavy_tails(grid: Grid) -> None:
    """A few large weights that hardly matter (their inputs are small) cost every other weight of their group."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 128, generator=generator) * 0.05
    weight[:, ::64] = 0.6
    rows = torch.randn(96, 128, generator=generator)
    rows[:, ::64] *= 0.02
    without = awq.choose(make_problem({"x": weight}, rows, grid=grid))
    clipped = awq.choose(make_problem({"x": weight}, rows, clip=True, grid=grid))
    assert "x" in clipped.treatments and not without.treatments
    assert clipped.losses["x"].after < 0.9 * without.losses["x"].after
    assert true_error(weight, rows, clipped.scale, clipped.treatments["x"].limits, grid) == pytest.approx(
        clipped.losses["x"].after, rel=1e-3
    )


def test_rounding_to_nearest_takes_the_same_ranges() -> None:
    weights, rows = planted(5)
    problem = make_problem(weights, rows)  # whatever `clip` says
    choice = rtn.choose_clipped(problem)
    assert choice.alpha is None and choice.scale is None and choice.treatments.keys() == weights.keys()
    for name, weight in weights.items():
        limits = choice.treatments[name].limits
        assert limits is not None and (limits <= weight.view(48, 2, 64).abs().amax(2)).all()
        before, after = true_error(weight, rows, None, None), true_error(weight, rows, None, limits)
        assert (choice.losses[name].before, choice.losses[name].after) == pytest.approx((before, after), rel=1e-3)
        assert after < 0.9 * before
    assert rtn.choose_clipped(replace(problem, inputs={})) == rtn.choose(problem)


def test_a_sample_of_many_outputs_finds_the_scale() -> None:
    """Thousands of outputs, of which 256 are tried: the same alpha as all of them give, and what it wins."""
    generator = torch.Generator().manual_seed(6)
    _, rows = planted(6)
    weight = torch.randn(2000, 128, generator=generator)
    found = awq.choose_scale(make_problem({"x": weight}, rows))
    errors = {
        alpha: true_error(weight, rows, (s / (s.max() * s.min()).sqrt()), None)
        for alpha in (i / 20 for i in range(20))
        for s in [rows.abs().mean(0) ** alpha]
    }
    assert found.alpha == pytest.approx(min(errors, key=errors.__getitem__), abs=0.051)
    assert found.losses["x"].after == pytest.approx(min(errors.values()), rel=0.02)


def test_scales_that_cannot_be_held_are_passed_over() -> None:
    weights, rows = planted(2)
    choice = awq.choose(make_problem(weights, rows, realise=lambda s: None))
    assert choice.alpha == 0 and choice.scale is None
    doubled = awq.choose(make_problem(weights, rows, realise=lambda s: torch.exp2(s.log2().round())))
    assert doubled.scale is not None and torch.equal(doubled.scale, torch.exp2(doubled.scale.log2().round()))


def test_inputs_of_zeros() -> None:
    weights, rows = planted(3)
    choice = awq.choose(make_problem(weights, torch.zeros_like(rows), clip=True))
    assert choice.scale is None and not choice.treatments
    rows[:, 5] = 0  # one dead channel
    scale = awq.choose(make_problem(weights, rows)).scale
    assert scale is None or (torch.isfinite(scale).all() and scale.min() > 0)


def test_without_inputs_nothing_is_chosen() -> None:
    weights, rows = planted(4)
    problem = make_problem(weights, rows)
    assert awq.choose(replace(problem, inputs={})) == rtn.choose(problem)
