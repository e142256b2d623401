"""A linear as another tool left it, in terms that all of their formats share. Nothing is read before it is asked for.

y = W (x · prescale), and W[o, i] = scale of (o, i) · (number[o, i] - offset of (o, i)).

Shapes: O output features (rows), I input features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import BLOCK

if TYPE_CHECKING:
    import torch

    Read = Callable[[], "torch.Tensor"]

TILE_ROWS = 128
# What a linear's input is rounded to: nothing, in steps found beforehand, in steps of each token's own.
PLAIN, STATIC, DYNAMIC = "16-bit", "static", "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLinear:
    """`name` without ".weight"; `shape` (O, I); `kind` int4, int8 or fp8; `tensors`: the names of all that it is of.

    grid: the shape of its scales: (O or 1, G), or that of blocks of BLOCK x BLOCK where `is_blocked`.
    numbers: int8, or float8_e4m3fn, [O, I]. scales: float32, `grid`; `scale_type` is what they are stored in.
    offsets: integers [O, G]; None of a format without zero points. groups: int64 [I], the group of each input; None
    where they are in order. prescale: [I], in the type that it is stored in. input_scale: float32 [1] of STATIC inputs.
    """

    name: str
    shape: tuple[int, int]
    kind: str
    grid: tuple[int, int]
    numbers: Read
    scales: Read
    scale_type: str
    tensors: tuple[str, ...]
    is_blocked: bool = False
    offsets: Read | None = None
    groups: Read | None = None
    prescale: Read | None = None
    inputs: str = PLAIN
    input_scale: Read | None = None

    @property
    def group(self) -> int:
        """Inputs per scale."""
        return self.shape[1] // self.grid[1]

    def is_in_order(self) -> bool:
        """Whether each group's inputs are one after the other, the groups too."""
        import torch

        return self.groups is None or torch.equal(self.groups(), torch.arange(self.shape[1]) // self.group)

    def has_offset(self) -> bool:
        return self.offsets is not None and bool(self.offsets().any())


def dequantize(linear: ForeignLinear) -> Iterator[torch.Tensor]:
    """The matrix that it stands for, float32, rows from the top: [at most TILE_ROWS, I] each.

    A product of a 4-bit number and a 16-bit scale is exact in float32; rounded to 16 bits it is what the formats' own
    kernels compute in 16 bits.
    """
    import torch

    numbers, scales = linear.numbers(), linear.scales()
    rows, columns = linear.shape
    offsets = linear.offsets() if linear.offsets is not None else None
    prescale = linear.prescale().float() if linear.prescale is not None else None
    size = BLOCK if linear.is_blocked else linear.group
    groups = torch.arange(columns) // size if linear.groups is None else linear.groups()
    for start in range(0, rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, rows)
        # TILE_ROWS is a block's height, so that a tile has one row of blocks.
        place = slice(start // BLOCK, start // BLOCK + 1) if linear.is_blocked else slice(start, stop)
        tile = numbers[start:stop].float()
        if offsets is not None:
            tile -= offsets[start:stop, groups].float()
        tile *= (scales if len(scales) == 1 else scales[place])[:, groups]
        yield tile if prescale is None else tile * prescale
