"""Kernels that multiply few rows by INT4 weights as they are packed: a quarter of the memory of 16-bit ones is read.

in, out: width of the input and number of outputs. group: inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pipeline.interpreter.native import Function, load_functions

GROUPS, COLUMNS = (32, 64, 128, 256), 16  # what both kernels take; columns in multiples
FEWEST_SHARED = 1 << 20  # multiplications, from which on another thread pays

# x [rows, in], packed, scales → [rows, out]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Kernel:
    """most_rows: up to which it beats a product with weights dequantized before (it unpacks anew for every few rows).
    pack: values of -8..7 [in, out] → as the kernel reads them; scale: [in / group, out] → the same.
    multiply(group, held): the product, in the type `held`; rows are taken as bf16, sums are fp32."""

    name: str
    most_rows: int
    pack: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    multiply: Callable[[int, torch.dtype], Multiply]


def pick_int4_kernel(group: int, columns: int) -> Int4Kernel | None:
    """None where no kernel takes such a weight."""
    if group not in GROUPS or columns % COLUMNS:
        return None
    functions = load_functions()
    return TORCH if functions is None else _native(functions.int4_linear)


def _torch_pack(values: Tensor) -> Tensor:
    unsigned = (values.t().int() + 8).contiguous()  # [out, in]
    return cast(Tensor, torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1))


def _torch_scale(scales: Tensor) -> Tensor:
    rounded = scales.to(torch.bfloat16)
    return torch.stack((rounded, torch.zeros_like(rounded)), dim=-1)


def _torch_multiply(group: int, held: torch.dtype) -> Multiply:
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return lambda x, packed, scales: multiply(x.to(torch.bfloat16).contiguous(), packed, group, scales).to(held)


TORCH = Int4Kernel(name="torch", most_rows=8, pack=_torch_pack, scale=_torch_scale, multiply=_torch_multiply)


def _native(function: Function) -> Int4Kernel:
    def multiply(group: int, held: torch.dtype) -> Multiply:
        made = torch.bfloat16 if held is torch.bfloat16 else torch.float32

        def run(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
            x = x.to(torch.bfloat16).contiguous()
            (rows, width), columns = x.shape, scales.shape[0] * COLUMNS
            y = torch.empty(rows, columns, dtype=made)
            threads = torch.get_num_threads() if rows * width * columns >= FEWEST_SHARED else 1
            function(
                x.data_ptr(),
                packed.data_ptr(),
                scales.data_ptr(),
                y.data_ptr(),
                made is torch.float32,
                rows,
                width,
                columns,
                width // group,
                threads,
            )
            return y if made is held else y.to(held)

        return run

    return Int4Kernel(name="native", most_rows=32, pack=_native_pack, scale=_native_scale, multiply=multiply)


def _native_pack(values: Tensor) -> Tensor:
    """[out / 16, in / 8, 16, 2] words of four nibbles: see native/int4.c."""
    width, columns = values.shape
    parts = (values.int() + 8).view(width // 8, 4, 2, columns // COLUMNS, COLUMNS).permute(3, 0, 4, 2, 1)
    words = parts[..., 0] | parts[..., 1] << 4 | parts[..., 2] << 8 | parts[..., 3] << 12
    return words.to(torch.int16).contiguous()  # the lower 16 bits


def _native_scale(scales: Tensor) -> Tensor:
    groups, columns = scales.shape
    return scales.float().view(groups, columns // COLUMNS, COLUMNS).transpose(0, 1).contiguous()
