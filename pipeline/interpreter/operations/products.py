"""Matrix products, and the quantized weights that feed them."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.interpreter.operations.site import Kernel, Site

FP8_MAX = 448.0  # the largest finite E4M3 value


def compile_matrix_multiply(site: Site) -> Kernel:
    """Sums accumulate in fp32 and are rounded once to the declared type.

    torch's bf16 kernels do that; its fp16 product on x86 is a scalar loop, so fp16 is widened, which is exact.
    """
    transpose = {"none": False, "transpose": True}
    flip_a, flip_b = site.choose("op0", transpose), site.choose("op1", transpose)
    held = site.held()

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        a = a.transpose(-1, -2) if flip_a else a
        b = b.transpose(-1, -2) if flip_b else b
        if held is torch.float16:
            return torch.matmul(a.float(), b.float()).to(held)
        return torch.matmul(a, b)

    return multiply


def compile_dequantize(site: Site) -> Kernel:
    """data * scale, computed in fp32 and rounded once."""
    spread, held = _compile_spread(site), site.held()
    return lambda data, scale: data.to(torch.float32).mul_(spread(scale.float(), data)).to(held)


def compile_quantize(site: Site) -> Kernel:
    """INT8 rounds half to even and clamps to [-128, 127]; FP8 E4M3 saturates."""
    spread, held = _compile_spread(site), site.held()
    if held is torch.int8:
        return lambda data, scale: torch.round(data.float() / spread(scale.float(), data)).clamp_(-128, 127).to(held)
    if held is torch.float8_e4m3fn:
        return lambda data, scale: (data.float() / spread(scale.float(), data)).clamp_(-FP8_MAX, FP8_MAX).to(held)
    raise site.refuse(f"to {site.node.outputs[0].dtype}")


def _compile_spread(site: Site) -> Kernel:
    """How a scale is laid over its data: one for all, one per index of `axis`, or one per block (of scale's rank)."""
    if site.optional(2) is not None:
        raise site.refuse("with a zero point")
    rank, scale = site.rank(), site.spec(1)
    if len(scale.shape) == 0:
        return lambda scale, data: scale
    if len(scale.shape) == rank:
        return _spread_blocks
    if len(scale.shape) != 1:
        raise site.refuse(f"a scale of shape {list(scale.shape)} over data of rank {rank}")
    if scale.shape[0] == 1:
        return lambda scale, data: scale
    axis = site.axis()
    shape = [-1 if i == axis else 1 for i in range(rank)]
    return lambda scale, data: scale.reshape(shape)


def _spread_blocks(scale: Tensor, data: Tensor) -> Tensor:
    for axis, (blocks, size) in enumerate(zip(scale.shape, data.shape, strict=True)):
        if blocks not in (1, size):
            if size % blocks:
                raise ValueError(f"{blocks} scales do not divide dimension {axis} of size {size}")
            scale = scale.repeat_interleave(size // blocks, axis)
    return scale


def unpack_int4(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """INT4 constants, two per byte, low nibble first in row-major order, as int8 values of -8 … 7."""
    low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts of int8 extend the sign
    return torch.stack((low, high), dim=-1).reshape(shape)
