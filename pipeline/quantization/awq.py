"""Activation-aware weight quantization: Lin et al., arXiv 2306.00978, §3.2 and the authors' code (llm-awq).

Weights that meet large activations matter more. Scaling an input channel up by s > 1 before rounding, and its input
down, shrinks that channel's error by s as long as the group's maximum stays. s = mean|x|^alpha, normalised so that
sqrt(max·min) = 1, with alpha from a grid that holds 0 (round to nearest), judged by the output error
|XWᵀ - (X/s)Q(W·s)ᵀ|² on sampled rows; for several linears that share s, by the sum.

alpha is one number for all outputs, so a sample of them finds it; whether it pays is asked of all of them. SmolLM2-135M
lost 0.143 nats per token so, and 0.145 where all outputs were tried.

Searches and choice are the same on either grid, see `int4_grids`.

Clipping (optional): each group's range is searched, see `clipping`; kept for a linear only where its whole output error
did not grow. What scaling wins, clipping may win as well, so a scale has to pay beside it.

Shapes: O output features, F of them sampled, I input features, g input features per group, R sampled rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.quantization.clipping import search_limits
from pipeline.quantization.int4 import round_trip
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pipeline.quantization.rules import Linear

# Then half a step to either side of the best.
STEP = 0.1
ALPHAS = tuple(i / 10 for i in range(10))
# Channels that calibration saw (almost) silent: they get the scale of one this much below the loudest.
FLOOR = 1e-4
# F of a linear; of all that share a scale at most so many together, but some of each: a routed layer has hundreds.
FEATURES, ALL_FEATURES, FEWEST_FEATURES = 256, 4096, 16


def choose(problem: Problem) -> Choice:
    """The scale, clipping limits and losses of a group; without inputs, plain rounding to nearest."""
    return _choose(problem, clip=problem.clip)


def choose_scale(problem: Problem) -> Choice:
    """The scale and its losses, without clipping."""
    return _choose(problem, clip=False)


def _choose(problem: Problem, *, clip: bool) -> Choice:
    if problem.mean_abs is None or not problem.inputs:
        return Choice()
    alpha, scale = _search(problem, clip=clip)
    choice, pays = apply_scale(problem, alpha, scale, clip=clip)
    return choice if pays or not alpha else apply_scale(problem, 0.0, None, clip=clip)[0]


def _search(problem: Problem, *, clip: bool) -> tuple[float, Tensor | None]:
    """The best alpha and its scale [I], None for 0, by the sampled outputs."""
    sample = _sample_outputs(problem)
    scales: dict[float, Tensor] = {}
    errors: dict[float, float] = {}

    def total(scale: Tensor, *, clip: bool) -> float:
        return sum(
            _weigh(problem, linear)
            * output_error(weight, scale, problem, linear, _limits(weight, scale, problem, linear) if clip else None)
            for linear, weight in sample
        )

    def attempt(alphas: Iterable[float]) -> float:
        """The best of those tried so far, after these."""
        for alpha in alphas:
            scale = _scale(problem, alpha)
            if scale is not None:
                scales[alpha], errors[alpha] = scale, total(scale, clip=False)
        return min(errors, key=errors.__getitem__)

    best = attempt(ALPHAS)
    if best:
        best = attempt((best - STEP / 2, best + STEP / 2))
    if best and clip:
        best = min((0.0, best), key=lambda alpha: total(scales[alpha], clip=True))
    return best, scales[best] if best else None


def _sample_outputs(problem: Problem) -> list[tuple[Linear, Tensor]]:
    """Weights [F, I] of each linear that calibration reached, from all over its outputs."""
    fed = [linear for linear in problem.linears if linear.name in problem.inputs]
    wanted = min(FEATURES, max(FEWEST_FEATURES, ALL_FEATURES // len(fed)))
    return [(x, problem.read(x.name)[:: -(-x.shape[0] // wanted)].contiguous()) for x in fed]


def apply_scale(problem: Problem, alpha: float | None, scale: Tensor | None, *, clip: bool) -> tuple[Choice, bool]:
    """The choice of this scale [I], with clipping limits where they pay, and whether all of it beats rounding to
    nearest."""
    treatments, losses = {}, {}
    change = 0.0
    for linear in problem.linears:
        if linear.name not in problem.inputs:
            continue
        weight = problem.read(linear.name)
        before = output_error(weight, None, problem, linear)
        after = before if scale is None else output_error(weight, scale, problem, linear)
        if clip:
            limits = _limits(weight, scale, problem, linear)
            clipped = output_error(weight, scale, problem, linear, limits)
            if clipped < after:
                treatments[linear.name], after = Treatment(limits=limits), clipped
        whole = max(_squared(problem.inputs[linear.name].rows @ weight.T), 1e-30)
        losses[linear.name] = Loss(before / whole, after / whole)
        change += _weigh(problem, linear) * (after - before)
    return Choice(alpha=alpha, scale=scale, treatments=treatments, losses=losses), change < 0


def _weigh(problem: Problem, linear: Linear) -> float:
    """Rows are a sample: how many tokens each stands for."""
    inputs = problem.inputs[linear.name]
    return inputs.tokens / max(inputs.rows.shape[0], 1)


def output_error(
    weight: Tensor, scale: Tensor | None, problem: Problem, linear: Linear, limits: Tensor | None = None
) -> float:
    """|rows·Wᵀ - (rows/s)·Q(W·s)ᵀ|² for W [O, I], all of a linear's outputs or some, s [I] and its rows [R, I]."""
    scaled = weight if scale is None else weight * scale
    rounded = round_trip(scaled, linear.group_size, scale_dtype=problem.scale_dtype, limits=limits, grid=problem.grid)
    rounded = rounded if scale is None else rounded.div_(scale)
    return _squared(problem.inputs[linear.name].rows @ rounded.sub_(weight).T)


def _limits(weight: Tensor, scale: Tensor | None, problem: Problem, linear: Linear) -> Tensor:
    """Clipping limits [O, I/g] for W·s, by the second moments of rows/s."""
    rows, group = problem.inputs[linear.name].rows, linear.group_size
    rows, weight = (rows, weight) if scale is None else (rows / scale, weight * scale)
    grouped = rows.view(rows.shape[0], -1, group).transpose(0, 1)
    return search_limits(weight, grouped.transpose(1, 2) @ grouped, group, problem.scale_dtype, problem.grid)


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


def _squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
