"""Kernels for the nodes that rules/pointwise.py writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.arithmetic import compile_sigmoid
from pipeline.interpreter.operations.site import Kernel, Site

FEWEST_SHARED = 1 << 16  # values, from which on another thread pays


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
    library = load_library()
    if library is None or normal not in NATIVE:
        return norm_fast

    def plan(empty: Empty, x: Tensor, weight: Tensor, eps: Tensor) -> Call | None:
        return _plan_norm(empty, normal, x, None, weight, eps)

    return NativeKernel(library=library, plan=plan, otherwise=norm_fast)


def compile_sum_norm(site: Site) -> Kernel:
    """Inputs: two summands of one shape, weight, eps. → their sum; its RMS norm."""
    norm, held, library = compile_rms_norm(site), site.held(), load_library()

    def sum_norm(x: Tensor, added: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, norm(total, weight, eps)

    if library is None or held not in NATIVE:
        return sum_norm

    def plan(empty: Empty, x: Tensor, added: Tensor, weight: Tensor, eps: Tensor) -> Call | None:
        return _plan_norm(empty, held, x, added, weight, eps)

    return NativeKernel(library=library, plan=plan, otherwise=sum_norm)


def _plan_norm(
    empty: Empty, held: torch.dtype, x: Tensor, added: Tensor | None, weight: Tensor, eps: Tensor
) -> Call | None:
    types, width = {x.dtype, weight.dtype, held if added is None else added.dtype}, x.shape[-1]
    rows = x.numel() // width
    in_rows = x.stride(-1) == 1 and (x.is_contiguous() or x.dim() == 2)
    if types != {held} or eps.dtype is not torch.float32:
        return None
    if not in_rows or not weight.is_contiguous() or (added is not None and added.stride() != x.stride()):
        return None
    y = empty(x.shape, dtype=held)
    total = None if added is None else empty(x.shape, dtype=held)
    return Call(
        kernel="rms_norm",
        arguments=(
            held is torch.bfloat16,
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            None if total is None else total.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            eps.data_ptr(),
            rows,
            width,
            width if x.is_contiguous() else x.stride(0),
        ),
        outputs=y if total is None else (total, y),
        threads=count_threads(x.numel(), FEWEST_SHARED),
    )


def compile_gate(site: Site) -> Kernel:
    """(g * sigmoid(g)) * u, rounded where the chain is, except in fast mode, where silu(g) is rounded once."""
    if site.numerics.mode != "fast":
        sigmoid = compile_sigmoid(site)
        return lambda g, u: sigmoid(g).mul_(g).mul_(u)
    library = load_library()

    def gate(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g).mul_(u)

    def plan(empty: Empty, g: Tensor, u: Tensor) -> Call | None:
        in_rows = g.dim() == 2 and g.stride(1) == 1 and u.stride(1) == 1
        if not in_rows or g.dtype not in NATIVE or g.dtype is not u.dtype:
            return None
        y = empty(g.shape, dtype=g.dtype)
        addresses = (g.data_ptr(), u.data_ptr(), y.data_ptr())
        arguments = (g.dtype is torch.bfloat16, *addresses, *g.shape, g.stride(0), u.stride(0))
        return Call(kernel="gate", arguments=arguments, outputs=y, threads=count_threads(g.numel(), FEWEST_SHARED))

    return gate if library is None else NativeKernel(library=library, plan=plan, otherwise=gate)
