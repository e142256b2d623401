"""SmoothQuant's search: eq. 4 of arXiv 2211.10438, and its effect through the stored tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.quantization import int8, smoothquant
from pipeline.quantization.capture import Inputs
from pipeline.quantization.problem import Choice, Problem
from pipeline.quantization.rules import Linear


def _problem(
    weights: dict[str, torch.Tensor],
    rows: torch.Tensor,
    realise: Callable[[torch.Tensor], torch.Tensor | None] = lambda s: s,
) -> Problem:
    inputs = Inputs(rows.abs().mean(0), rows.abs().amax(0), rows, rows.shape[0])
    linears = tuple(
        Linear(name=n, role="mlp", layer=0, expert=None, shape=tuple(w.shape), method="smoothquant", group=None)
        for n, w in weights.items()
    )
    return Problem(
        name="x",
        linears=linears,
        read=weights.__getitem__,
        mean_abs=inputs.mean_abs,
        max_abs=inputs.max_abs,
        inputs=dict.fromkeys(weights, inputs),
        realise=realise,
        scale_dtype=torch.float32,
        clip=False,
    )


def _planted(outliers: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(96, 128, generator=generator)
    rows[:, torch.randperm(128, generator=generator)[:outliers]] *= 40
    return {name: torch.randn(48, 128, generator=generator) for name in ("fc", "gate")}, rows


def _true_error(weight: torch.Tensor, rows: torch.Tensor, choice: Choice, name: str) -> float:
    """Relative squared output error through what is stored, as an engine would compute it."""
    s = torch.ones(weight.shape[1]) if choice.scale is None else choice.scale
    q, channels = int8.quantize(weight * s)
    amax = choice.treatments[name].input_amax
    assert amax is not None
    step = amax / 127
    x = (rows / s / step).round().clamp(-128, 127) * step
    wanted = rows @ weight.T
    return float((x @ (q.float() * channels[:, None]).T - wanted).square().sum() / wanted.square().sum())


def test_outliers_move_into_the_weights() -> None:
    weights, rows = _planted(outliers=4)
    choice = smoothquant.choose(_problem(weights, rows))
    assert choice.alpha is not None and 0.3 <= choice.alpha <= 0.9 and choice.scale is not None
    for name, weight in weights.items():
        loss = choice.losses[name]
        assert loss.after < 0.1 * loss.before
        assert _true_error(weight, rows, choice, name) == pytest.approx(loss.after, rel=1e-3)
        assert choice.treatments[name].input_amax == pytest.approx(float((rows / choice.scale).abs().max()), rel=1e-6)


def test_the_scale_is_that_of_the_paper() -> None:
    peaks, columns = torch.tensor([8.0, 2.0, 0.5]), torch.tensor([0.5, 2.0, 0.5])
    found = smoothquant.smoothing_scale(peaks, columns, 0.5)
    raw = [8**0.5 / 0.5**0.5, 1.0, 1.0]
    middle = (max(raw) * min(raw)) ** 0.5
    assert found.tolist() == pytest.approx([value / middle for value in raw])


def test_silent_channels_and_vanishing_weights_stay_finite() -> None:
    found = smoothquant.smoothing_scale(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.0]), 0.5)
    assert torch.isfinite(found).all() and found.min() > 0


def test_no_smoothing_is_a_candidate() -> None:
    """And the only one where the checkpoint can hold no other scale."""
    weights, rows = _planted(outliers=4)
    choice = smoothquant.choose(_problem(weights, rows, realise=lambda s: None))
    assert choice.scale is None and choice.alpha is None
    assert choice.losses["fc"].before == choice.losses["fc"].after
    assert choice.treatments["fc"].input_amax == pytest.approx(float(rows.abs().max()), rel=1e-6)
