"""Activation-aware weight quantization: Lin et al., arXiv 2306.00978, §3.2 and the authors' code (llm-awq).

Weights that meet large activations matter more. Scaling an input channel up by s > 1 before rounding, and its input
down, shrinks that channel's error by s as long as the group's maximum stays. s = mean|x|^alpha, normalised so that
sqrt(max·min) = 1, with alpha from a grid that holds 0 (round to nearest), judged by the output error
|XWᵀ - (X/s)Q(W·s)ᵀ|² on sampled rows; for several linears that share s, by the sum.

Clipping (optional): each group's range is searched, see `clipping`; kept for a linear only where its whole output error
did not grow. The scale is kept only where it pays beside clipping too.

Shapes: O output features, I input features, g input features per group, R sampled rows.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from pipeline.quantization.clipping import search_limits
from pipeline.quantization.int4 import round_trip
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from pipeline.quantization.capture import Inputs
    from pipeline.quantization.rules import Linear

# Then half a step to either side of the best.
STEP = 0.1
ALPHAS = tuple(i / 10 for i in range(10))
# Channels that calibration saw (almost) silent: they get the scale of one this much below the loudest.
FLOOR = 1e-4


def choose(problem: Problem) -> Choice:
    """The scale, clipping limits and losses of a group; without inputs, plain rounding to nearest."""
    choice = choose_scale(problem)
    if not problem.clip or not choice.losses:
        return choice
    # What scaling wins, clipping may win as well: a scale has to pay beside it.
    unscaled = replace(
        choice, alpha=0.0, scale=None, losses={n: Loss(x.before, x.before) for n, x in choice.losses.items()}
    )
    clipped = [_clip_all(problem, each) for each in ((unscaled, choice) if choice.alpha else (unscaled,))]
    return min(clipped, key=itemgetter(1))[0]


def choose_scale(problem: Problem) -> Choice:
    """The scale and its losses, without clipping."""
    if problem.mean_abs is None or not problem.inputs:
        return Choice()
    linears = [linear for linear in problem.linears if linear.name in problem.inputs]
    whole = {x.name: max(_squared(problem.inputs[x.name].rows @ problem.read(x.name).T), 1e-30) for x in linears}
    errors: dict[float, dict[str, float]] = {}
    scales: dict[float, Tensor] = {}

    def attempt(alphas: Iterable[float]) -> float:
        """The best of those tried so far, after these."""
        new = {alpha: s for alpha in alphas if (s := _scale(problem, alpha)) is not None}
        scales.update(new)
        errors.update({alpha: {} for alpha in new})
        for linear in linears:
            weight, rows = problem.read(linear.name), problem.inputs[linear.name].rows
            for alpha, s in new.items():
                errors[alpha][linear.name] = output_error(weight, s, rows, linear.group_size, problem.scale_dtype)
        return min(errors, key=lambda alpha: _total(problem, errors[alpha]))

    best = attempt(ALPHAS)
    if best:
        best = attempt((best - STEP / 2, best + STEP / 2))
    losses = {name: Loss(errors[0.0][name] / whole[name], errors[best][name] / whole[name]) for name in whole}
    return Choice(alpha=best, scale=scales[best] if best else None, losses=losses)


def _total(problem: Problem, errors: Mapping[str, float]) -> float:
    """Rows are a sample: weigh them by the tokens that they stand for."""
    inputs = problem.inputs
    return sum(error * inputs[name].tokens / max(inputs[name].rows.shape[0], 1) for name, error in errors.items())


def output_error(
    weight: Tensor, scale: Tensor, rows: Tensor, group: int, scale_dtype: torch.dtype, limits: Tensor | None = None
) -> float:
    """|rows·Wᵀ - (rows/s)·Q(W·s)ᵀ|² for W [O, I], s [I], rows [R, I]."""
    rounded = round_trip(weight * scale, group, scale_dtype=scale_dtype, limits=limits)
    return _squared(rows @ rounded.div_(scale).sub_(weight).T)


def _scale(problem: Problem, alpha: float) -> Tensor | None:
    """The scale [I] of an alpha, ones for 0; None where the checkpoint cannot hold it."""
    mean = problem.mean_abs
    if mean is None:
        raise ValueError("a scale needs a mean")
    top = mean.max()
    if alpha == 0:
        return torch.ones_like(mean)
    if top <= 0:
        return None
    s = (mean / top).clamp(min=FLOOR) ** alpha
    return problem.realise(s / (s.max() * s.min()).sqrt())


def _clip_all(problem: Problem, choice: Choice) -> tuple[Choice, float]:
    """The choice with clipping limits where they pay, and its error."""
    treatments, losses, errors = {}, {}, {}
    for linear in problem.linears:
        if linear.name in choice.losses:
            limits, ratio, errors[linear.name] = _clip(problem, linear, choice.scale, problem.inputs[linear.name])
            before = choice.losses[linear.name]
            losses[linear.name] = Loss(before.before, before.after * ratio)
            if limits is not None:
                treatments[linear.name] = Treatment(limits=limits)
    return replace(choice, treatments=treatments, losses=losses), _total(problem, errors)


def _clip(problem: Problem, linear: Linear, scale: Tensor | None, inputs: Inputs) -> tuple[Tensor | None, float, float]:
    """(limits [O, I/g], error over that without, error) where clipping lowers the linear's error; else (None, 1, …)."""
    weight, group = problem.read(linear.name), linear.group_size
    s = torch.ones(weight.shape[1]) if scale is None else scale
    grouped_rows = (inputs.rows / s).view(inputs.rows.shape[0], -1, group).transpose(0, 1)
    gram = grouped_rows.transpose(1, 2) @ grouped_rows
    limits = search_limits(weight * s, gram, group, problem.scale_dtype)
    error, clipped = (output_error(weight, s, inputs.rows, group, problem.scale_dtype, x) for x in (None, limits))
    return (limits, clipped / error, clipped) if clipped < error else (None, 1.0, error)


def _squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
