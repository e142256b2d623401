"""Kernels for the nodes that rules/pointwise.py writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.native import load_functions
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.arithmetic import compile_sigmoid
from pipeline.interpreter.operations.site import Kernel, Site

MOST_ALONE = 1 << 16  # values for which one thread is enough


def compile_rms_norm(site: Site) -> Kernel:
    """Rounded where the chain that it stands for is: the quotient once, its product with the weight once."""
    normal, width = site.numerics.held(site.attribute("normal")), site.spec(0).shape[-1]

    def norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        wide = x.float()
        root = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_()
        return (wide / root).to(normal) * weight

    def norm_fast(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = torch.addcmul(eps, length, length, value=1 / width).rsqrt_()
        return (wide * factor).to(normal) * weight

    if site.numerics.mode != "fast" or width < 1:
        return norm
    functions = load_functions()
    if functions is None or normal not in NATIVE:
        return norm_fast

    def norm_native(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        if x.numel() > MOST_ALONE or x.dtype is not normal or weight.dtype is not normal:
            return norm_fast(x, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        functions.rms_norm(
            normal is torch.bfloat16,
            x.data_ptr(),
            None,
            None,
            weight.data_ptr(),
            y.data_ptr(),
            eps.item(),
            x.numel() // width,
            width,
        )
        return y

    return norm_native


def compile_sum_norm(site: Site) -> Kernel:
    """Inputs: two summands of one shape, weight, eps. → their sum; its RMS norm."""
    norm, held = compile_rms_norm(site), site.held()
    width, functions = site.spec(0).shape[-1], load_functions()

    def sum_norm(x: Tensor, added: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        types = {x.dtype, added.dtype, weight.dtype}
        if functions is None or held not in NATIVE or types != {held} or x.numel() > MOST_ALONE:
            total = x + added
            return total, norm(total, weight, eps)
        x, added, weight = x.contiguous(), added.contiguous(), weight.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(x)
        functions.rms_norm(
            held is torch.bfloat16,
            x.data_ptr(),
            added.data_ptr(),
            total.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            eps.item(),
            x.numel() // width,
            width,
        )
        return total, y

    return sum_norm


def compile_gate(site: Site) -> Kernel:
    """(g * sigmoid(g)) * u, rounded where the chain is, except in fast mode, where silu(g) is rounded once."""
    if site.numerics.mode != "fast":
        sigmoid = compile_sigmoid(site)
        return lambda g, u: sigmoid(g).mul_(g).mul_(u)
    functions = load_functions()

    def gate(g: Tensor, u: Tensor) -> Tensor:
        rows = g.dim() == 2 and g.stride(1) == 1 and u.stride(1) == 1
        if functions is None or not rows or g.dtype not in NATIVE or g.dtype is not u.dtype or g.numel() > MOST_ALONE:
            return F.silu(g).mul_(u)
        y = torch.empty(g.shape, dtype=g.dtype)
        functions.gate(
            g.dtype is torch.bfloat16,
            g.data_ptr(),
            u.data_ptr(),
            y.data_ptr(),
            *g.shape,
            g.stride(0),
            u.stride(0),
        )
        return y

    return gate
