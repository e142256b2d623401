"""Group-wise asymmetric INT4, w ≈ (q - z)·s with q and z in [0, 15]: for exports to formats that have zero points.

Never in an engine: TensorRT refuses an INT4 zero point other than 0. The range of a group always holds 0, so that a
weight of 0 stays 0.

Shapes: O output features, I input features, g input features per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Asymmetric:
    """`q` uint8 [O, I], `scales` float32 [O, I/g], `zeros` uint8 [O, I/g]."""

    q: Tensor
    scales: Tensor
    zeros: Tensor

    def dequantize(self) -> Tensor:
        """float32 [O, I]."""
        rows, groups = self.scales.shape
        grouped = self.q.view(rows, groups, -1).float().sub_(self.zeros[:, :, None].float())
        return grouped.mul_(self.scales[:, :, None]).view(self.q.shape)


def quantize_asymmetric(
    weight: Tensor, group: int, *, scale_dtype: torch.dtype | None = None, name: str = "weight"
) -> Asymmetric:
    """Rounds `weight` [O, I] to nearest.

    The scale is rounded to `scale_dtype` (the weight's own unless given) before the weights are divided by it.
    Raises QuantizationError for NaN or infinite weights, and where `group` does not divide I.
    """
    rows, columns = weight.shape
    if group <= 0 or columns % group:
        raise QuantizationError(
            f"{name}: a group of {group} does not divide its {columns} input features",
            hint="choose a group size that divides them",
        )
    grouped = weight.float().view(rows, -1, group)
    if not torch.isfinite(grouped).all():
        raise QuantizationError(
            f"{name} has NaN or infinite values",
            hint="the checkpoint is damaged, or overflowed when it was converted to float16",
        )
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / LEVELS).to(scale_dtype or weight.dtype).float()
    scales.masked_fill_(scales == 0, 1.0)
    zeros = (-low / scales).round_().clamp_(0, LEVELS)
    q = (grouped / scales[:, :, None]).round_().add_(zeros[:, :, None]).clamp_(0, LEVELS)
    return Asymmetric(q=q.to(torch.uint8).view(rows, columns), scales=scales, zeros=zeros.to(torch.uint8))
