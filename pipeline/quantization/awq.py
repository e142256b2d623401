"""Activation-aware weight quantization: Lin et al., arXiv 2306.00978, §3.2 and the authors' code (llm-awq).

Weights that meet large activations matter more. Scaling an input channel up by s > 1 before rounding, and its input
down, shrinks that channel's error by s as long as the group's maximum stays. s = mean|x|^alpha, normalised so that
sqrt(max·min) = 1, with alpha from a grid that holds 0 (round to nearest), judged by the output error
|XWᵀ - (X/s)Q(W·s)ᵀ|² on sampled rows; for several linears that share s, by the sum.

Clipping (optional): each group's range is searched, see `clipping`; kept for a linear only where its whole output error
did not grow.

Shapes: O output features, I input features, g input features per group, R sampled rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeline.quantization.clipping import search_limits
from pipeline.quantization.int4 import round_trip
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.quantization.capture import Inputs
    from pipeline.quantization.rules import Linear

ALPHAS = tuple(i / 20 for i in range(20))
# Channels that calibration saw (almost) silent: they get the scale of one this much below the loudest.
FLOOR = 1e-4


def choose(problem: Problem) -> Choice:
    """The scale, clipping limits and losses of a group; without inputs, plain rounding to nearest."""
    choice = choose_scale(problem)
    if not problem.clip:
        return choice
    treatments, losses = {}, dict(choice.losses)
    for linear in problem.linears:
        if linear.name in losses:
            limits, ratio = _clip(problem, linear, choice.scale, problem.inputs[linear.name])
            if limits is not None:
                treatments[linear.name] = Treatment(limits=limits)
                losses[linear.name] = Loss(losses[linear.name].before, losses[linear.name].after * ratio)
    return replace(choice, treatments=treatments, losses=losses)


def choose_scale(problem: Problem) -> Choice:
    """The scale and its losses, without clipping."""
    if problem.mean_abs is None or not problem.inputs:
        return Choice()
    candidates = _candidates(problem)
    linears = [linear for linear in problem.linears if linear.name in problem.inputs]
    errors: dict[str, list[float]] = {}
    outputs: dict[str, float] = {}
    total = torch.zeros(len(candidates), dtype=torch.float64)
    for linear in linears:
        weight, inputs = problem.read(linear.name), problem.inputs[linear.name]
        found = [output_error(weight, s, inputs.rows, linear.group_size, problem.scale_dtype) for _, s in candidates]
        errors[linear.name] = found
        outputs[linear.name] = _squared(inputs.rows @ weight.T)
        # Rows are a sample: weigh them by the tokens that they stand for.
        total += torch.tensor(found, dtype=torch.float64) * (inputs.tokens / max(inputs.rows.shape[0], 1))
    best = int(total.argmin())
    alpha, scale = candidates[best]
    losses = {
        name: Loss(found[0] / max(outputs[name], 1e-30), found[best] / max(outputs[name], 1e-30))
        for name, found in errors.items()
    }
    return Choice(alpha=alpha, scale=None if alpha == 0 else scale, losses=losses)


def output_error(
    weight: Tensor, scale: Tensor, rows: Tensor, group: int, scale_dtype: torch.dtype, limits: Tensor | None = None
) -> float:
    """|rows·Wᵀ - (rows/s)·Q(W·s)ᵀ|² for W [O, I], s [I], rows [R, I]."""
    rounded = round_trip(weight * scale, group, scale_dtype=scale_dtype, limits=limits)
    return _squared(rows @ rounded.div_(scale).sub_(weight).T)


def _candidates(problem: Problem) -> list[tuple[float, Tensor]]:
    """(alpha, s) of the grid that the checkpoint can hold; the first is (0, ones)."""
    mean = problem.mean_abs
    if mean is None:
        raise ValueError("candidates need a mean")
    candidates = [(0.0, torch.ones_like(mean))]
    top = mean.max()
    if top <= 0:
        return candidates
    for alpha in ALPHAS[1:]:
        s = (mean / top).clamp(min=FLOOR) ** alpha
        realised = problem.realise(s / (s.max() * s.min()).sqrt())
        if realised is not None:
            candidates.append((alpha, realised))
    return candidates


def _clip(problem: Problem, linear: Linear, scale: Tensor | None, inputs: Inputs) -> tuple[Tensor | None, float]:
    """(limits [O, I/g], error over the error without) where clipping lowers the linear's error, else (None, 1)."""
    weight, group = problem.read(linear.name), linear.group_size
    s = torch.ones(weight.shape[1]) if scale is None else scale
    grouped_rows = (inputs.rows / s).view(inputs.rows.shape[0], -1, group).transpose(0, 1)
    gram = grouped_rows.transpose(1, 2) @ grouped_rows
    limits = search_limits(weight * s, gram, group, problem.scale_dtype)
    error, clipped = (output_error(weight, s, inputs.rows, group, problem.scale_dtype, x) for x in (None, limits))
    return (limits, clipped / error) if clipped < error else (None, 1.0)


def _squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
