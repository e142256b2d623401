"""GPTQ against the textbook, and where it must win."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import QuantizationError
from pipeline.quantization import gptq, int4
from pipeline.quantization.moments import Factors, Moment, MomentSum, factorize
from pipeline.quantization.problem import Choice, Problem
from tests.quantization.test_awq import make_problem, planted

GROUP = 32


def correlated(seed: int, rows: int = 64, columns: int = 96, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [rows, columns], and inputs [tokens, columns] of fewer directions than channels, and some noise."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 3, columns, generator=generator)
    x = torch.randn(tokens, columns // 3, generator=generator) @ mixing
    x += 0.3 * torch.randn(tokens, columns, generator=generator)
    x *= torch.rand(columns, generator=generator) * 2 + 0.1
    return torch.randn(rows, columns, generator=generator), x


def moment_of(x: torch.Tensor) -> torch.Tensor:
    total = MomentSum()
    for part in torch.split(x, 150):
        total.add(part)
    return total.finish()


def textbook(
    weight: torch.Tensor, scales: torch.Tensor, moment: torch.Tensor, damping: float = 0.01
) -> npt.NDArray[np.float64]:
    """Optimal Brain Quantization in the order of H's diagonal, in float64: round one column, subtract its error times
    its row of the inverse over the pivot from all columns left, and drop it from the inverse (OBQ, arXiv 2208.11580,
    equations 2 to 4). No Cholesky factor, no blocks."""
    w, h = weight.double().numpy().copy(), moment.double().numpy().copy()
    h += np.eye(len(h)) * damping * np.diag(h).mean()
    inverse = np.linalg.inv(h)
    s = scales.double().numpy().repeat(w.shape[1] // scales.shape[1], axis=1)
    q = np.zeros_like(w)
    for column in np.argsort(-np.diag(h), kind="stable"):
        q[:, column] = np.clip(np.rint(w[:, column] / s[:, column]), -8, 7)
        error = w[:, column] - q[:, column] * s[:, column]
        w -= np.outer(error / inverse[column, column], inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        w[:, column] = 0
    return q


def output_error(weight: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (int4.dequantize(int4.pack(q), scales) - weight).T).square().mean())


def problem_of(weights: dict[str, torch.Tensor], x: torch.Tensor, *, clip: bool = False) -> Problem:
    moment = Moment("x", lambda: moment_of(x))
    return replace(make_problem(weights, x, clip=clip, group=GROUP), moments=dict.fromkeys(weights, moment))


def rounded(choice: Choice, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    round_weight = choice.treatments[name].round
    assert round_weight is not None
    return round_weight(weight)


@pytest.mark.parametrize("columns", [96, 160, 256])  # below, beyond and at a multiple of a block
def test_rounds_as_the_textbook_does(columns: int) -> None:
    weight, x = correlated(0, columns=columns)
    scales = int4.find_scales(weight, GROUP, scale_dtype=torch.float16)
    found = gptq.round_columns(weight, scales, factorize(moment_of(x))).numpy()
    expected = textbook(weight, scales, moment_of(x))
    # A value within float32's error of a half goes either way, and moves others of its row.
    assert (found != expected).any(axis=1).mean() <= 0.05
    assert found.min() >= -8 and found.max() <= 7


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=15, deadline=None)
def test_better_than_rounding_to_nearest(seed: int, clip: bool) -> None:
    weight, x = correlated(seed)
    q, scales = rounded(gptq.choose(problem_of({"x": weight}, x, clip=clip)), "x", weight)
    nearest = int4.quantize(weight, GROUP)
    assert output_error(weight, q, scales, x) < 0.6 * output_error(weight, *nearest, x)


def test_scaled_by_awq_first() -> None:
    """What it stores is the scaled weight, for inputs divided by the scale."""
    weights, x = planted(0)
    problem = problem_of(weights, x)
    choice = gptq.choose_scaled(problem)
    assert choice.scale is not None and choice.alpha
    for name, weight in weights.items():
        q, scales = rounded(choice, name, weight * choice.scale)
        dequantized = int4.dequantize(int4.pack(q), scales) / choice.scale
        error = float((x @ (dequantized - weight).T).square().sum() / (x @ weight.T).square().sum())
        assert error == pytest.approx(choice.losses[name].after, rel=1e-3)
        assert error < 0.5 * choice.losses[name].before


def test_losses_are_those_of_what_is_stored() -> None:
    weight, x = correlated(1)
    choice = gptq.choose(problem_of({"x": weight}, x, clip=True))
    assert not choice.losses  # not before it is written
    q, scales = rounded(choice, "x", weight)
    whole = float((x @ weight.T).square().mean())
    assert choice.losses["x"].after == pytest.approx(output_error(weight, q, scales, x) / whole, rel=1e-3)
    nearest = int4.quantize(weight, GROUP, scale_dtype=torch.float32)
    assert choice.losses["x"].before == pytest.approx(output_error(weight, *nearest, x) / whole, rel=1e-3)


def test_scales_are_the_models_type() -> None:
    weight, x = correlated(2)
    choice = gptq.choose(replace(problem_of({"x": weight}, x, clip=True), scale_dtype=torch.bfloat16))
    _, scales = rounded(choice, "x", weight)
    assert torch.equal(scales, scales.bfloat16().float())


def test_without_inputs_nothing_is_chosen() -> None:
    weight, x = correlated(3)
    choice = gptq.choose(make_problem({"x": weight}, x, group=GROUP))
    assert choice.scale is None and not choice.treatments


def test_channels_without_input_are_rounded_to_nearest() -> None:
    weight, x = correlated(4)
    x[:, 5:40] = 0
    q, _ = rounded(gptq.choose(problem_of({"x": weight}, x)), "x", weight)
    nearest, _ = int4.quantize(weight, GROUP, scale_dtype=torch.float32)
    assert torch.equal(q[:, 5:40], nearest[:, 5:40])
    silent = gptq.choose(problem_of({"x": weight}, torch.zeros_like(x)))
    assert torch.equal(rounded(silent, "x", weight)[0], nearest)


def test_fewer_tokens_than_channels() -> None:
    weight, x = correlated(5, tokens=20)
    q, scales = rounded(gptq.choose(problem_of({"x": weight}, x)), "x", weight)
    assert output_error(weight, q, scales, x) < 0.3 * output_error(weight, *int4.quantize(weight, GROUP), x)


def test_the_same_on_any_number_of_threads() -> None:
    weight, x = correlated(6, columns=256, tokens=2000)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(rounded(gptq.choose(problem_of({"x": weight}, x, clip=True)), "x", weight))
    finally:
        torch.set_num_threads(threads)
    for q, scales in found[1:]:
        assert torch.equal(q, found[0][0]) and torch.equal(scales, found[0][1])


def test_infinite_activations_are_refused() -> None:
    weight, x = correlated(7)
    x[3, 3] = float("inf")
    with pytest.raises(QuantizationError, match="second moments"):
        rounded(gptq.choose(problem_of({"x": weight}, x)), "x", weight)


def test_damaged_weights_are_refused() -> None:
    weight, x = correlated(8)
    choice = gptq.choose(problem_of({"x": weight}, x))
    weight[3, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"x\.weight has NaN"):
        rounded(choice, "x", weight)


def test_only_the_last_factor_is_held() -> None:
    _, x = correlated(9)
    made: list[str] = []

    def moment(key: str) -> Moment:
        def make() -> torch.Tensor:
            made.append(key)
            return moment_of(x)

        return Moment(key, make)

    factors, scale = Factors(), torch.full((x.shape[1],), 2.0)
    first = factors.get(moment("a"), None)
    assert factors.get(moment("a"), None) is first
    scaled = factors.get(moment("a"), scale)
    torch.testing.assert_close(scaled.moment, first.moment / 4)
    assert factors.get(moment("b"), scale) is factors.get(moment("b"), scale)
    factors.get(moment("a"), None)
    assert made == ["a", "a", "b", "a"]
