"""SmoothQuant: Xiao et al., arXiv 2211.10438. INT8 weights and inputs, both static.

A few input channels are far larger than the others and would take the whole range of an input's one scale. Dividing
channel j of the input by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (eq. 4) and multiplying the weights' columns by it
moves the difficulty into the weights, which have a scale per output channel. alpha comes from a grid, judged by the
output error |XWᵀ - Q(X/s) Q(W·s)ᵀ|² on sampled rows, inputs rounded as the engine will; no smoothing is a candidate.

Shapes: O output features, I input features, R sampled rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.quantization.int8 import encode, input_step, quantize
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from torch import Tensor

ALPHAS = tuple(i / 10 for i in range(11))
# Channels that calibration saw (almost) silent, or whose weights vanish, count as this much below the loudest.
FLOOR = 1e-5


def choose(problem: Problem) -> Choice:
    """The smoothing scale, the inputs' range behind it, and the losses of a group; without inputs, nothing."""
    peaks = problem.max_abs
    linears = [linear for linear in problem.linears if linear.name in problem.inputs]
    if peaks is None or not linears:
        return Choice()
    columns = torch.stack([problem.read(linear.name).abs().amax(0) for linear in problem.linears]).amax(0)
    candidates: list[tuple[float | None, Tensor]] = [(None, torch.ones_like(peaks))]
    for alpha in ALPHAS:
        realised = problem.realise(smoothing_scale(peaks, columns, alpha))
        if realised is not None:
            candidates.append((alpha, realised))
    errors: dict[str, list[float]] = {}
    outputs: dict[str, float] = {}
    total = torch.zeros(len(candidates), dtype=torch.float64)
    for linear in linears:
        weight, inputs = problem.read(linear.name), problem.inputs[linear.name]
        found = [
            output_error(weight, scale, inputs.rows, float((inputs.max_abs / scale).max())) for _, scale in candidates
        ]
        errors[linear.name] = found
        outputs[linear.name] = max(float((inputs.rows @ weight.T).square().sum(dtype=torch.float64)), 1e-30)
        # Rows are a sample: weigh them by the tokens that they stand for.
        total += torch.tensor(found, dtype=torch.float64) * (inputs.tokens / max(inputs.rows.shape[0], 1))
    best = int(total.argmin())
    chosen, scale = candidates[best]
    return Choice(
        alpha=chosen,
        scale=None if chosen is None else scale,
        treatments={name: Treatment(input_amax=float((problem.inputs[name].max_abs / scale).max())) for name in errors},
        losses={name: Loss(found[0] / outputs[name], found[best] / outputs[name]) for name, found in errors.items()},
    )


def smoothing_scale(peaks: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """s [I] of eq. 4 from max|X_j| and max|W_j|, normalised so that sqrt(max·min) = 1, which changes no error and keeps
    16-bit carriers in their range."""
    x = peaks.clamp(min=max(float(peaks.max()) * FLOOR, 1e-30))
    w = columns.clamp(min=max(float(columns.max()) * FLOOR, 1e-30))
    s = x**alpha / w ** (1 - alpha)
    return s / (s.max() * s.min()).sqrt()


def output_error(weight: Tensor, scale: Tensor, rows: Tensor, input_amax: float) -> float:
    """|rows·Wᵀ - Q(rows/s) Q(W·s)ᵀ|² for W [O, I], s [I], rows [R, I]; inputs in steps of input_amax/127."""
    step = input_step(input_amax)
    q, channels = quantize(weight * scale)
    product = (encode(rows / scale / step).float() * step) @ (q.float() * channels[:, None]).T
    return float((product - rows @ weight.T).square().sum(dtype=torch.float64))
