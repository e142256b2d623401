"""The two grids of INT4: where a group's numbers lie, w ≈ (q - z)·s with q in [-8, 7]. Searches take either.

The symmetric one has no z, and is what engines have: TensorRT refuses an INT4 zero point other than 0. The asymmetric
one, for exports, spreads all 16 numbers over the group's own range, which always holds 0, so that a weight of 0 stays
0. Formats that count from 0 to 15 have 8 more in q and z.

Shapes: any, one element per group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LOWEST, HIGHEST = -8, 7
ASYMMETRIC_SCALES = torch.float16  # of every format that has zero points, whatever the model's type

# (smallest weight, largest, limits, scale type) -> (s, z), in float32; z None where it is 0. `limits` bounds the range
# on either side: larger weights are clipped. s is rounded to the type *before* weights are divided by it, so that an
# engine that holds scales in it loses nothing more.
Grid = Callable[["Tensor", "Tensor", "Tensor | None", torch.dtype], "tuple[Tensor, Tensor | None]"]


def symmetric(low: Tensor, high: Tensor, limits: Tensor | None, scale_dtype: torch.dtype) -> tuple[Tensor, None]:
    """s = amax/7, and 1 where that is zero."""
    amax = torch.maximum(low.neg(), high)
    amax = amax if limits is None else torch.minimum(amax, limits)
    return _round(amax / HIGHEST, scale_dtype), None


def asymmetric(low: Tensor, high: Tensor, limits: Tensor | None, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """s = (high - low)/15, z where `low` becomes -8. Clipped as AWQ's authors clip (llm-awq's `auto_clip`)."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    if limits is not None:
        low, high = torch.maximum(low, limits.neg()), torch.minimum(high, limits)
    scales = _round((high - low) / (HIGHEST - LOWEST), scale_dtype)
    return scales, (LOWEST - low / scales).round_().clamp_(LOWEST, HIGHEST)


def place(values: Tensor, scales: Tensor, zeros: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """The nearest q of each of `values`, as whole numbers in float32; scales and zeros as wide as they are."""
    q = torch.div(values, scales, out=out).round_()
    return (q if zeros is None else q.add_(zeros)).clamp_(LOWEST, HIGHEST)


def restore(q: Tensor, scales: Tensor, zeros: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """The weights that q (changed where it has zeros) stands for."""
    return torch.mul(q if zeros is None else q.sub_(zeros), scales, out=out)


def _round(scales: Tensor, scale_dtype: torch.dtype) -> Tensor:
    scales = scales.to(scale_dtype).float()
    return scales.masked_fill_(scales == 0, 1.0)
