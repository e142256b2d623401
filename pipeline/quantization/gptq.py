"""GPTQ: Frantar et al., arXiv 2210.17323, and the same on weights that AWQ has scaled.

A linear's columns are rounded one after the other; what rounding one costs the output is made up for by those still to
come, which the inverse of H = mean(x·xᵀ) tells how (Optimal Brain Surgeon). Columns of large inputs go first
(activation order), while they can still be made up for. Groups are static: their scales are found before anything is
rounded, so that a column's group is its place in the checkpoint, whatever the order, and the layout needs no index.

Each group's scale is searched (see `clipping`). It is rounded to the model's type before a weight is divided by it.

On SmolLM2-135M in groups of 64, calibrated on 32 x 256 tokens of Python's documentation, the loss over the original as
a share of rounding to nearest's, measured on what was written: 0.18 on other pages of it, 0.43 on Perl's; with AWQ's
scale first 0.18 and 0.29. What made the difference: activation order, and the ranges (see `clipping`).

Shapes: O output features, I input features, g input features per group, B columns per block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeline.quantization import awq
from pipeline.quantization.clipping import search_limits
from pipeline.quantization.int4 import find_scales, round_trip
from pipeline.quantization.int4_grids import HIGHEST, LOWEST
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from torch import Tensor

    from pipeline.quantization.moments import Factor

BLOCK = 128  # B: columns whose errors are carried over one by one; all later ones get a block's errors in one product


def choose(problem: Problem) -> Choice:
    """No scale of the input; every linear that calibration reached is rounded by GPTQ when it is written."""
    return _round_with(problem, Choice())


def choose_scaled(problem: Problem) -> Choice:
    """AWQ's scale, then GPTQ on the weights and inputs so scaled. The limits are GPTQ's own."""
    return _round_with(problem, awq.choose_scale(problem))


def _round_with(problem: Problem, choice: Choice) -> Choice:
    losses: dict[str, Loss] = {}
    treatments = {
        linear.name: Treatment(
            round=partial(_round_linear, problem, linear.name, linear.group_size, choice.scale, losses)
        )
        for linear in problem.linears
        if linear.name in problem.moments
    }
    return Choice(alpha=choice.alpha, scale=choice.scale, treatments=treatments, losses=losses)


def _round_linear(
    problem: Problem,
    name: str,
    group: int,
    scale: Tensor | None,
    losses: MutableMapping[str, Loss],
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """`Treatment.round` of the scaled weight [O, I]; notes what it lost."""
    factor = problem.factors.get(problem.moments[name], scale)
    scales = find_scales(
        weight,
        group,
        scale_dtype=problem.scale_dtype,
        limits=search_limits(weight, factor.weights(group), group, problem.scale_dtype) if problem.clip else None,
        name=f"{name}.weight",
    )
    q = round_columns(weight, scales, factor)
    plain = weight if scale is None else weight / scale
    nearest = round_trip(plain, group, scale_dtype=problem.scale_dtype)
    nearest = nearest if scale is None else nearest.mul_(scale)
    whole = max(factor.error(weight), 1e-30)
    losses[name] = Loss(
        factor.error(nearest.sub_(weight)) / whole, factor.error(dequantize(q, scales).sub_(weight)) / whole
    )
    return q, scales


def to_int4(x: Tensor) -> Tensor:
    """Rounded in place."""
    return x.round_().clamp_(LOWEST, HIGHEST)


def round_columns(weight: Tensor, scales: Tensor, factor: Factor, grid: Callable[[Tensor], Tensor] = to_int4) -> Tensor:
    """`weight` [O, I] in the groups of `scales` [O, I/g], as int8 [O, I]: algorithm 1 of the paper. Another `grid` puts
    quotients on other numbers, in place and in float32, and so is the result.

    Works on the transpose: a column, its scale and its error are contiguous, as is each block of them.
    """
    columns = weight.shape[1]
    group = columns // scales.shape[1]
    order, upper = factor.order, factor.upper
    w = weight.T[order]  # [I, O]
    s = scales.T[order // group]
    q = torch.empty_like(w)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(w[start:stop])
        for j in range(start, stop):
            q[j] = grid(torch.div(w[j], s[j]))
            error = torch.sub(w[j], q[j] * s[j], out=errors[j - start]).div_(upper[j, j])
            w[j + 1 : stop].addr_(upper[j, j + 1 : stop], error, alpha=-1)
        w[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    result = torch.empty_like(q)
    result[order] = q
    return result.T.to(torch.int8 if grid is to_int4 else torch.float32).contiguous()


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] of q int8 [O, I] and scales [O, I/g]."""
    rows, groups = scales.shape
    return (q.view(rows, groups, -1) * scales[:, :, None]).view(q.shape)
