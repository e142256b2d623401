"""Matrix products, and the quantized weights that feed them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.numerics import multiplied_as
from pipeline.interpreter.operations.site import Kernel, Site

FP8_MAX = 448.0  # the largest finite E4M3 value
# Rows of a product in exact mode are a multiple of this. MKL and oneDNN take other kernels for fewer rows (one, two or
# three, and what is left of fours), which add in another order; from there on a row's bits depend on nothing but the
# row (tests/interpreter/test_company.py). Zeros fill up.
ROWS = 8


def compile_matrix_multiply(site: Site) -> Kernel:
    """Sums accumulate in fp32 and are rounded once to the declared type.

    torch's kernels do that; those types that it multiplies slowly are widened before.
    """
    transpose = {"none": False, "transpose": True}
    flip_a, flip_b = site.choose("op0", transpose), site.choose("op1", transpose)
    held = site.held()
    inner = multiplied_as(held)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        a = a.transpose(-1, -2) if flip_a else a
        b = b.transpose(-1, -2) if flip_b else b
        return torch.matmul(a, b) if inner is held else torch.matmul(a.to(inner), b.to(inner)).to(held)

    return steady_rows(site, multiply)


def fill_rows(x: Tensor, multiple: int = ROWS) -> Tensor:
    """[…, T, K] with zero rows after the last up to the next multiple."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def steady_rows(site: Site, kernel: Kernel) -> Kernel:
    """In exact mode, a product of which each row's bits are the same whatever other rows there are, and however many.
    A number of rows that is fixed by the network needs nothing."""
    if site.numerics.mode != "exact" or site.attribute("op0") != "none" or site.spec(0).shape[-2] != -1:
        return kernel

    def multiply(x: Tensor, *rest: Tensor | None) -> Tensor:
        rows = x.shape[-2]
        filled: Tensor = kernel(fill_rows(x), *rest)
        return filled if filled.shape[-2] == rows else filled.narrow(-2, 0, rows)

    return multiply


def compile_dequantize(site: Site) -> Kernel:
    """data * scale, computed in fp32 and rounded once."""
    lay_out, held = _compile_layout(site), site.held()

    def dequantize(data: Tensor, scale: Tensor) -> Tensor:
        shape, factors = lay_out(data, scale)
        return data.to(torch.float32).view(shape).mul_(factors).view(data.shape).to(held)

    return dequantize


def compile_quantize(site: Site) -> Kernel:
    """INT8 rounds half to even and clamps to [-128, 127]; FP8 E4M3 saturates."""
    lay_out, held = _compile_layout(site), site.held()
    if held not in (torch.int8, torch.float8_e4m3fn):
        raise site.refuse(f"to {site.node.outputs[0].dtype}")

    def quantize(data: Tensor, scale: Tensor) -> Tensor:
        shape, divisors = lay_out(data, scale)
        return round_steps((data.float().reshape(shape) / divisors).reshape(data.shape), held)

    return quantize


def round_steps(steps: Tensor, to: torch.dtype) -> Tensor:
    """float32 numbers of steps, which are written over, as INT8 or FP8."""
    if to is torch.int8:
        return steps.round_().clamp_(-128, 127).to(to)
    return steps.clamp_(-FP8_MAX, FP8_MAX).to(to)


Layout = Callable[[Tensor, Tensor], tuple[tuple[int, ...], Tensor]]


def _compile_layout(site: Site) -> Layout:
    """How a scale lies over its data: one for all, one per index of `axis`, or one per block (of scale's rank). Gives
    the shape to see the data in and the scale, in fp32, in a shape that broadcasts over it: nothing is repeated."""
    if site.optional(2) is not None:
        raise site.refuse("with a zero point")
    rank, scale = site.rank(), site.spec(1)
    if len(scale.shape) == rank and rank > 0:
        return _lay_out_blocks
    if len(scale.shape) > 1:
        raise site.refuse(f"a scale of shape {list(scale.shape)} over data of rank {rank}")
    axis = site.axis() if len(scale.shape) == 1 and scale.shape[0] != 1 else None
    over = [-1 if i == axis else 1 for i in range(rank)]
    return lambda data, scale: (tuple(data.shape), scale.float().reshape(over))


def _lay_out_blocks(data: Tensor, scale: Tensor) -> tuple[tuple[int, ...], Tensor]:
    shape: list[int] = []
    over: list[int] = []
    for axis, (blocks, size) in enumerate(zip(scale.shape, data.shape, strict=True)):
        if blocks in (1, size):
            shape.append(size)
            over.append(blocks)
        elif size % blocks:
            raise ValueError(f"{blocks} scales do not divide dimension {axis} of size {size}")
        else:
            shape += [blocks, size // blocks]
            over += [blocks, 1]
    return tuple(shape), scale.float().reshape(over)


def unpack_int4(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """INT4 constants, two per byte, low nibble first in row-major order, as int8 values of -8 … 7."""
    low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts of int8 extend the sign
    return torch.stack((low, high), dim=-1).reshape(shape)
