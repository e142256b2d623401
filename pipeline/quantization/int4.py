"""Group-wise INT4: rounding to it, and the packed layout of TensorRT-LLM's W4A16_AWQ checkpoints.

Shapes: O rows (output features), I columns (input features), g columns per group. A group shares one scale s, and on
the asymmetric grid a zero point z: w ≈ (q - z)·s with q in [-8, 7], see `int4_grids`. Two rows share a byte: byte
(r, c) holds row 2r in its low nibble, row 2r + 1 in its high one, both two's complement (modelopt's
`pack_int4_in_uint8`, read by TensorRT-LLM 1.2 as int8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pipeline.errors import QuantizationError
from pipeline.quantization.int4_grids import Grid, asymmetric, place, restore, symmetric

if TYPE_CHECKING:
    from torch import Tensor

TILE_ELEMENTS = 1 << 18  # 1 MiB of float32: large enough to hide torch's cost per call, small enough for a core's L2


class Rows(Protocol):
    """What a weight [O, I] must be able to: a tensor, or something that makes rows when asked for them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __getitem__(self, rows: slice, /) -> Tensor: ...


def quantize(
    weight: Tensor,
    group: int,
    *,
    scale_dtype: torch.dtype | None = None,
    limits: Tensor | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """As `quantize_packed`, unpacked: (q int8 [O, I], scales float32 [O, I/g])."""
    packed, scales = quantize_packed(weight, group, scale_dtype=scale_dtype, limits=limits, name=name)
    return unpack(packed), scales


def quantize_packed(
    weight: Rows,
    group: int,
    *,
    scale_dtype: torch.dtype | None = None,
    limits: Tensor | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """Rounds `weight` [O, I] to w ≈ q·s, tile by tile: (q packed, int8 [O/2, I]; s, float32 [O, I/g]).

    Scales are rounded to `scale_dtype` (the weight's own type unless given). `limits` [O, I/g] replaces the groups'
    amax: larger weights are clipped (AWQ, arXiv 2306.00978, its code's `auto_clip`). Raises QuantizationError for NaN
    or infinite weights, naming `name`, and for shapes that do not pack.
    """
    packed, scales, _ = _quantize(_Rounder(weight, group, scale_dtype, limits, name, symmetric))
    return packed, scales


def quantize_with_zeros(
    weight: Rows,
    group: int,
    *,
    scale_dtype: torch.dtype | None = None,
    limits: Tensor | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same to w ≈ (q - z)·s, with z int8 [O, I/g] in [-8, 7] as third."""
    packed, scales, zeros = _quantize(_Rounder(weight, group, scale_dtype, limits, name, asymmetric))
    return packed, scales, zeros.to(torch.int8)


def round_trip(
    weight: Tensor,
    group: int,
    *,
    scale_dtype: torch.dtype | None = None,
    limits: Tensor | None = None,
    grid: Grid = symmetric,
) -> Tensor:
    """What rounding `weight` [O, I] and back makes of it: float32 [O, I]. For searches, which do this many times."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.float32)
    rounder = _Rounder(weight, group, scale_dtype, limits, "weight", grid)
    for start, stop in rounder.tiles():
        steps = rounder.steps(start, stop)
        grouped = rounder.round_floats(start, stop, *steps)
        restore(grouped, *_widen(*steps), out=result[start:stop].view_as(grouped))
    return result


def find_scales(
    weight: Tensor,
    group: int,
    *,
    scale_dtype: torch.dtype | None = None,
    limits: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """The scales float32 [O, I/g] alone, as `quantize_packed` has them, which also says what raises."""
    _check_pairs(weight.shape[0], name)
    rounder = _Rounder(weight, group, scale_dtype, limits, name, symmetric)
    return torch.cat([rounder.steps(start, stop)[0] for start, stop in rounder.tiles()])


def pack(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """int8 [O, I] with values in [-8, 7] → int8 [O/2, I]. O must be even."""
    _check_pairs(q.shape[0], "q")
    pairs = q.view(q.shape[0] // 2, 2, q.shape[1])
    packed = torch.mul(pairs[:, 1], 16, out=out)  # a shift by 4, but vectorized
    return packed.bitwise_or_(pairs[:, 0] & 0x0F)


def unpack(packed: Tensor) -> Tensor:
    """int8 [O/2, I] → int8 [O, I] with values in [-8, 7]."""
    half, columns = packed.shape
    q = torch.empty(half, 2, columns, dtype=torch.int8)
    torch.bitwise_and(packed, 0x0F, out=q[:, 0])
    q[:, 0].bitwise_xor_(8).sub_(8)  # the sign of a nibble: 8..15 → -8..-1
    torch.bitwise_right_shift(packed, 4, out=q[:, 1])  # arithmetic: the sign comes along
    return q.view(2 * half, columns)


def dequantize(packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """(int8 [O/2, I], float32 [O, I/g], int8 [O, I/g]) → float32 [O, I] = (q - z)·s, exact when the scales are 16-bit
    floats."""
    rows, groups = scales.shape
    columns = packed.shape[1]
    if packed.shape[0] * 2 != rows or columns % groups:
        raise QuantizationError(
            f"packed weight {tuple(packed.shape)} and scales {tuple(scales.shape)} do not belong together",
            hint="a packed weight is [out/2, in], its scales are [out, in/group]",
        )
    weight = torch.empty(rows, groups, columns // groups, dtype=torch.float32)
    step = _tile_rows(columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        q = unpack(packed[start // 2 : stop // 2]).view(stop - start, groups, -1)
        values = weight[start:stop].copy_(q)
        if zeros is not None:
            values.sub_(zeros[start:stop, :, None])
        values.mul_(scales[start:stop, :, None])
    return weight.view(rows, columns)


class _Rounder:
    """Two steps over a tile of rows, in buffers made once: the tile's scales and zeros, then its rounded weights."""

    def __init__(
        self, weight: Rows, group: int, scale_dtype: torch.dtype | None, limits: Tensor | None, name: str, grid: Grid
    ) -> None:
        self.weight, self.group, self.limits, self.name, self.grid = weight, group, limits, name, grid
        self.groups = _groups(weight.shape[1], group, name)
        self.scale_dtype = scale_dtype or weight.dtype
        rows = min(_tile_rows(weight.shape[1]), weight.shape[0])
        self.values = torch.empty(rows, weight.shape[1], dtype=torch.float32)
        self.q = torch.empty(rows, weight.shape[1], dtype=torch.int8)

    def tiles(self) -> list[tuple[int, int]]:
        rows = self.weight.shape[0]
        step = max(self.values.shape[0], 1)
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def steps(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros [rows, I/g] of the tile; leaves the tile in `values` for `round`."""
        values = self.values[: stop - start].copy_(self.weight[start:stop])
        grouped = values.view(stop - start, -1, self.group)
        low, high = grouped.amin(2), grouped.amax(2)  # torch.aminmax takes ten times as long
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise QuantizationError(
                f"{self.name} has NaN or infinite values in rows {start} to {stop - 1}",
                hint="the checkpoint is damaged, or overflowed when it was converted to float16",
            )
        return self.grid(low, high, None if self.limits is None else self.limits[start:stop], self.scale_dtype)

    def round(self, start: int, stop: int, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """int8 [rows, I] of the tile last given to `steps`, whose result goes in; valid until the next call."""
        q = self.q[: stop - start]
        q.copy_(self.round_floats(start, stop, scales, zeros).view(q.shape))
        return q

    def round_floats(self, start: int, stop: int, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """The same as whole numbers in float32, [rows, I/g, g]."""
        values = self.values[: stop - start].view(stop - start, -1, self.group)
        return place(values, *_widen(scales, zeros), out=values)


def _quantize(rounder: _Rounder) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scales, zeros), the zeros in float32."""
    rows, columns = rounder.weight.shape
    _check_pairs(rows, rounder.name)
    packed = torch.empty(rows // 2, columns, dtype=torch.int8)
    scales = torch.empty(rows, rounder.groups, dtype=torch.float32)
    zeros = torch.zeros_like(scales)
    for start, stop in rounder.tiles():
        steps = rounder.steps(start, stop)
        scales[start:stop] = steps[0]
        if steps[1] is not None:
            zeros[start:stop] = steps[1]
        pack(rounder.round(start, stop, *steps), out=packed[start // 2 : stop // 2])
    return packed, scales, zeros


def _widen(scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return scales[:, :, None], None if zeros is None else zeros[:, :, None]


def _groups(columns: int, group: int, name: str) -> int:
    if group <= 0 or columns % group:
        raise QuantizationError(
            f"{name}: a group of {group} does not divide its {columns} input features",
            hint="choose a group size that divides them (stages.quantize.group_size), or exclude the linear",
        )
    return columns // group


def _check_pairs(rows: int, name: str) -> None:
    if rows % 2:
        raise QuantizationError(
            f"{name} has {rows} output features; INT4 packs them in pairs", hint="exclude the linear from quantization"
        )


def _tile_rows(columns: int) -> int:
    """An even number of rows (pairs share a byte) of about TILE_ELEMENTS elements."""
    return max(2, TILE_ELEMENTS // max(columns, 1) // 2 * 2)
