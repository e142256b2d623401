"""INT8, symmetric, one scale per output channel: w ≈ q·s with q in [-127, 127], s = amax/127 of the channel.

Shapes: O output, I input features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.quantization.int4 import Rows

LARGEST = 127.0
_TILE_ELEMENTS = 1 << 18


def quantize(weight: Rows, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(q int8 [O, I], s float32 [O], 1 for a channel of zeros). Raises QuantizationError for NaN or infinite ones."""
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, dtype=torch.float32)
    step = max(1, _TILE_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        amax = part.abs().amax(1)
        if not torch.isfinite(amax).all():
            raise QuantizationError(
                f"{name} has NaN or infinite values in rows {start} to {start + part.shape[0] - 1}",
                hint="the checkpoint is damaged, or overflowed when it was converted to float16",
            )
        scales[start : start + step] = scale = scale_of(amax)
        q[start : start + step] = encode(part / scale[:, None])
    return q, scales


def encode(x: Tensor) -> Tensor:
    """Rounded, halves to even, within [-127, 127]."""
    return x.round().clamp_(-LARGEST, LARGEST).to(torch.int8)


def scale_of(amax: Tensor) -> Tensor:
    """amax/127, and 1 where that is zero."""
    scale = amax.float() / LARGEST
    return scale.masked_fill(scale == 0, 1.0)


def input_step(amax: float) -> float:
    """The same of an input."""
    return float(scale_of(torch.tensor(amax)))
