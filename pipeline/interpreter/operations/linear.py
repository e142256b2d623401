"""Products with a constant: kernels for the `linear` nodes that fusion.py writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pipeline.interpreter.operations.products import compile_matrix_multiply, steady_rows
from pipeline.interpreter.operations.site import Kernel, Site

# Rows up to which torch's INT4 kernel beats the dequantized product (measured with AVX-512; it unpacks anew for every
# few rows), and what it takes.
FEW_ROWS, KERNEL_GROUPS, KERNEL_COLUMNS = 4, (32, 64, 128, 256), 16


def compile_linear(site: Site) -> Kernel:
    return steady_rows(site, _compile_kept(site))


def _compile_kept(site: Site) -> Kernel:
    """x @ W for a constant W, packed once in the blocked layout that oneDNN's kernels read (twice as fast here as a
    plain weight for one row, and never slower). fp16 has no such kernel on x86: it is held and computed in fp32."""
    held, transposed = site.held(), site.attribute("op1") == "transpose"
    weight, general = site.constant(1), compile_matrix_multiply(site)
    if weight is None:  # too large to keep: it is made at each step, of a stack of experts one at a time
        parts = site.parts(1)
        return general if parts is None else _compile_stack(general, *parts)
    inner = torch.float32 if held is torch.float16 else held
    rows = weight if transposed else weight.transpose(-1, -2)
    nbytes = weight.numel() * inner.itemsize
    if weight.dim() == 2 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
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


def compile_linear_int4(site: Site) -> Kernel:
    """Inputs: x [T, in], W dequantized, W [in, out], scales [in / group, out]."""
    general, packed, scales = compile_linear(site), site.constant(2), site.constant(3)
    if packed is None or scales is None:
        return lambda x, weight, _packed, _scales: general(x, weight)
    group, columns = packed.shape[0] // scales.shape[0], packed.shape[1]
    if group not in KERNEL_GROUPS or columns % KERNEL_COLUMNS:
        return lambda x, weight, _packed, _scales: general(x, weight)

    def pack() -> Tensor:  # [out, in], unsigned
        unsigned = (packed.t().int() + 8).contiguous()
        return cast(Tensor, torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1))

    nbytes, held = packed.numel() // 2, site.held()
    rows = site.prepare(2, "kernel", nbytes, pack)
    scale = scales.to(torch.bfloat16)
    pairs = site.prepare(3, "kernel", 2 * scale.nbytes, lambda: torch.stack((scale, torch.zeros_like(scale)), dim=-1))
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def linear(x: Tensor, weight: Tensor | None, _packed: None, _scales: None) -> Tensor:
        if x.shape[0] > FEW_ROWS:
            return cast(Tensor, general(x, weight))
        return cast(Tensor, multiply(x.to(torch.bfloat16).contiguous(), rows, group, pairs).to(held))

    return linear if rows is not None and pairs is not None else lambda x, weight, _p, _s: general(x, weight)
