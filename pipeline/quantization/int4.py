"""Group-wise symmetric INT4: rounding to it, and the packed layout of TensorRT-LLM's W4A16_AWQ checkpoints.

Shapes: O rows (output features), I columns (input features), g columns per group. A group shares one scale s:
w ≈ q·s with q in [-8, 7]. Two rows share a byte: byte (r, c) holds row 2r in its low nibble, row 2r + 1 in its high
one, both two's complement (modelopt's `pack_int4_in_uint8`, read by TensorRT-LLM 1.2 as int8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

LOWEST, HIGHEST = -8, 7
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

    s = amax/7 of the group (1 where that is zero), rounded to `scale_dtype` (the weight's own type unless given)
    *before* the weights are divided by it, so that an engine that holds scales in that type loses nothing more.
    `limits` [O, I/g] replaces the groups' amax: larger weights are clipped (AWQ, arXiv 2306.00978, its code's
    `auto_clip`). Raises QuantizationError for NaN or infinite weights, naming `name`, and for shapes that do not pack.
    """
    rows, columns = weight.shape
    _check_pairs(rows, name)
    packed = torch.empty(rows // 2, columns, dtype=torch.int8)
    scales = torch.empty(rows, _groups(columns, group, name), dtype=torch.float32)
    rounder = _Rounder(weight, group, scale_dtype, limits, name)
    for start, stop in rounder.tiles():
        scales[start:stop] = rounder.scale(start, stop)
        pack(rounder.round(start, stop, scales[start:stop, :, None]), out=packed[start // 2 : stop // 2])
    return packed, scales


def round_trip(
    weight: Tensor, group: int, *, scale_dtype: torch.dtype | None = None, limits: Tensor | None = None
) -> Tensor:
    """What `quantize` and back makes of `weight` [O, I]: float32 [O, I]. For searches, which do this many times."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.float32)
    rounder = _Rounder(weight, group, scale_dtype, limits, "weight")
    for start, stop in rounder.tiles():
        scales = rounder.scale(start, stop)[:, :, None]
        grouped = rounder.round_floats(start, stop, scales).view(stop - start, -1, group)
        torch.mul(grouped, scales, out=result[start:stop].view_as(grouped))
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
    scales = torch.empty(weight.shape[0], _groups(weight.shape[1], group, name), dtype=torch.float32)
    rounder = _Rounder(weight, group, scale_dtype, limits, name)
    for start, stop in rounder.tiles():
        scales[start:stop] = rounder.scale(start, stop)
    return scales


def scales_of(amax: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """float32: amax/7 rounded to `scale_dtype`, and 1 where that is zero."""
    scales = (amax / HIGHEST).to(scale_dtype).float()
    return scales.masked_fill_(scales == 0, 1.0)


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


def dequantize(packed: Tensor, scales: Tensor) -> Tensor:
    """(int8 [O/2, I], float32 [O, I/g]) → float32 [O, I] = q·s, exact when the scales are 16-bit floats."""
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
        weight[start:stop].copy_(q).mul_(scales[start:stop, :, None])
    return weight.view(rows, columns)


class _Rounder:
    """Two steps over a tile of rows, in buffers made once: the tile's scales, then its rounded weights."""

    def __init__(
        self, weight: Rows, group: int, scale_dtype: torch.dtype | None, limits: Tensor | None, name: str
    ) -> None:
        self.weight, self.group, self.limits, self.name = weight, group, limits, name
        self.scale_dtype = scale_dtype or weight.dtype
        rows = min(_tile_rows(weight.shape[1]), weight.shape[0])
        self.values = torch.empty(rows, weight.shape[1], dtype=torch.float32)
        self.scratch = torch.empty_like(self.values)
        self.q = torch.empty(rows, weight.shape[1], dtype=torch.int8)

    def tiles(self) -> list[tuple[int, int]]:
        rows = self.weight.shape[0]
        step = max(self.values.shape[0], 1)
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def scale(self, start: int, stop: int) -> Tensor:
        """Scales [rows, I/g] of the tile; leaves the tile in `values` for `round`."""
        values = self.values[: stop - start].copy_(self.weight[start:stop])
        magnitude = torch.abs(values, out=self.scratch[: stop - start])
        amax = magnitude.view(stop - start, -1, self.group).amax(dim=2)
        if not torch.isfinite(amax).all():
            raise QuantizationError(
                f"{self.name} has NaN or infinite values in rows {start} to {stop - 1}",
                hint="the checkpoint is damaged, or overflowed when it was converted to float16",
            )
        if self.limits is not None:
            amax = torch.minimum(amax, self.limits[start:stop])
        return scales_of(amax, self.scale_dtype)

    def round(self, start: int, stop: int, scales: Tensor) -> Tensor:
        """int8 [rows, I] of the tile last given to `scale`; valid until the next call. `scales` [rows, I/g, 1]."""
        return self.q[: stop - start].copy_(self.round_floats(start, stop, scales))

    def round_floats(self, start: int, stop: int, scales: Tensor) -> Tensor:
        """The same as whole numbers in float32."""
        values = self.values[: stop - start]
        values.view(stop - start, -1, self.group).div_(scales)
        return values.round_().clamp_(LOWEST, HIGHEST)


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
