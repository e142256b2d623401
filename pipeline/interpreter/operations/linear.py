"""Products with a constant: kernels for the `linear` nodes that fusion.py writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.interpreter.native import Call
from pipeline.interpreter.native.kernel import Empty, NativeKernel, adapt
from pipeline.interpreter.numerics import multiplied_as
from pipeline.interpreter.operations.heads import compile_heads
from pipeline.interpreter.operations.packed import pick_kernel
from pipeline.interpreter.operations.products import compile_matrix_multiply, steady_rows
from pipeline.interpreter.operations.site import Kernel, Site


def compile_linear(site: Site) -> Kernel:
    native = compile_heads(site, lambda: _compile_kept(site))
    return steady_rows(site, _compile_kept(site)) if native is None else native


def _compile_kept(site: Site) -> Kernel:
    """x @ W for a constant W, packed once in the blocked layout that oneDNN's kernels read. Against a plain weight:
    with AVX-512 twice as fast for one row and never slower; with AVX2 alone 0.7 times as fast for one row, and 1.3 to
    1.9 times from two on."""
    held, transposed = site.held(), site.attribute("op1") == "transpose"
    weight, general = site.constant(1), compile_matrix_multiply(site)
    if weight is None:  # too large to keep: it is made at each step, of a stack of experts one at a time
        parts = site.parts(1)
        return general if parts is None else _compile_stack(general, *parts)
    inner = multiplied_as(held)
    rows = weight if transposed else weight.transpose(-1, -2)
    nbytes = weight.numel() * inner.itemsize
    if weight.dim() == 2:
        pack = torch.ops.mkldnn._reorder_linear_weight
        packed = site.prepare(1, f"packed {transposed}", nbytes, lambda: pack(rows.to(inner).contiguous()))
        multiply = torch.ops.mkldnn._linear_pointwise.default
        if packed is not None:
            if inner is held:
                return lambda x, _: multiply(x, packed, None, "none", [], "")
            return lambda x, _: multiply(x.to(inner), packed, None, "none", [], "").to(held)
    form = "plain" if weight.dtype is inner else "wide"
    wide = site.prepare(1, form, nbytes, lambda: weight.to(inner))
    if wide is None and weight.dim() == 3:
        return _compile_stack(general, len(weight), lambda entry: weight[entry : entry + 1])
    if wide is None:
        return lambda x, _: general(x, weight)
    factor = wide.transpose(-1, -2) if transposed else wide
    return lambda x, _: torch.matmul(x.to(inner), factor).to(held)


def _compile_stack(multiply: Kernel, count: int, part: Callable[[int], Tensor]) -> Kernel:
    """x [1 or E, T, in] times a stack of E weights, of which one is made at a time."""

    def stack(x: Tensor, _: None) -> Tensor:
        if x.dim() != 3 or x.shape[0] not in (1, count):
            raise ValueError(f"factors {list(x.shape)} over a stack of {count} weights")
        return torch.cat([multiply(x[e : e + 1] if len(x) > 1 else x, part(e)) for e in range(count)])

    return stack


def compile_linear_packed(site: Site) -> Kernel:
    """Inputs: x [T, in], W dequantized, W as its numbers, scales. Of INT4 W is [in, out] and scales [in / group, out],
    of INT8 [out, in] (`op1` says so) and [out]."""
    return adapt(compile_linears_packed(site), lambda *inputs: inputs, lambda outputs: outputs[0])


def compile_linears_packed(site: Site) -> Kernel:
    """x [T, in] times several weights side by side. Inputs: x, then of each what linear_packed takes. Rows go to a
    kernel for packed weights; where the processor is fast in bf16, many go to a product with the weights dequantized,
    of which a copy is kept."""
    transposed = site.attribute("op1") == "transpose"
    starts = range(1, len(site.inputs), 3)
    specs = [site.spec(start + 1) for start in starts]
    columns = [spec.shape[0 if transposed else 1] for spec in specs]
    width = specs[0].shape[1 if transposed else 0]
    group = width if transposed else width // site.spec(3).shape[0]
    numbers = [site.constant(start + 1) for start in starts]
    scales = [site.constant(start + 2) for start in starts]
    kernel = pick_kernel(specs[0].dtype, group, math.gcd(*columns))
    if kernel is None or any(tensor is None for tensor in (*numbers, *scales)):
        return _compile_side_by_side(site, starts, columns, 0 if transposed else 1)

    def pack() -> Tensor:
        whole = torch.cat(cast(list[Tensor], numbers), dim=0 if transposed else 1)
        return kernel.pack(whole.t() if transposed else whole)

    def scale() -> Tensor:
        rows = [tensor.view(width // group, -1) for tensor in cast(list[Tensor], scales)]
        return kernel.scale(torch.cat(rows, dim=1))

    values = width * sum(columns)
    rows = site.prepare(2, f"{kernel.name} {columns}", values * kernel.bits // 8, pack)
    factors = site.prepare(3, f"{kernel.name} {columns}", 4 * values // group, scale)
    if rows is None or factors is None:
        return _compile_side_by_side(site, starts, columns, 0 if transposed else 1)
    multiply, most_rows = kernel.multiply(group, site.held()), kernel.most_rows
    few = adapt(multiply, lambda x, *_: (x, rows, factors), lambda product: torch.split(product, columns, dim=1))
    if most_rows is None:
        site.unread.update(starts)
        return few
    many = _compile_side_by_side(site, starts, columns, 0 if transposed else 1)

    def linears(x: Tensor, *weights: Tensor | None) -> Any:
        return many(x, *weights) if x.shape[0] > most_rows else few(x)

    if not isinstance(few, NativeKernel):
        return linears
    inner = few.plan

    def plan(empty: Empty, x: Tensor, *_: Tensor | None) -> Call | None:
        return inner(empty, x) if x.shape[0] <= most_rows else None

    return replace(few, plan=plan, otherwise=linears)


def _compile_side_by_side(site: Site, starts: Sequence[int], columns: list[int], side: int) -> Kernel:
    """The same with the dequantized weights, whose outputs are dimension `side`: in one product where they can be
    kept."""
    if len(columns) == 1:
        single = compile_linear(site)
        return lambda x, weight, *_: (single(x, weight),)
    weights = [site.constant(start) for start in starts]
    if any(weight is None for weight in weights):
        kernels = [compile_linear(site.part(0, start)) for start in starts]
        return lambda x, *w: tuple(kernel(x, w[3 * i]) for i, kernel in enumerate(kernels))
    whole = compile_linear(
        replace(
            site,
            constant=lambda index: torch.cat(cast(list[Tensor], weights), dim=side) if index == 1 else None,
            prepare=lambda index, form, nbytes, make: site.prepare(index, f"{form} {columns}", nbytes, make),
        )
    )
    return lambda x, *_: whole(x, None).split(columns, dim=1)
