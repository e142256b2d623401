"""Kernels that multiply few rows by INT4 or INT8 weights as they are packed: a quarter or half of the memory of 16-bit
ones is read.

in, out: width of the input and number of outputs. group: inputs that share a scale, all of them in INT8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pipeline.interpreter.native import Functions, load_functions

GROUPS, COLUMNS = (32, 64, 128, 256), 16  # what both INT4 kernels take; columns in multiples
WIDTH = 8  # … and inputs of the INT8 kernel
FEWEST_SHARED = 1 << 20  # multiplications, from which on another thread pays

# x [rows, in], packed, scales → [rows, out]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKernel:
    """most_rows: up to which it beats a product with weights dequantized before (it unpacks anew for every few rows):
    of INT8 fewer where that product is in bf16, which reads half as much as one in fp32.
    bits: of a weight. pack: values [in, out] → as the kernel reads them; scale: [in / group, out] → the same.
    multiply(group, held): the product, in the type `held`; rows are taken as bf16 or fp32, sums are fp32."""

    name: str
    bits: int
    most_rows: int
    pack: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    multiply: Callable[[int, torch.dtype], Multiply]


def pick_kernel(dtype: str, group: int, columns: int) -> PackedKernel | None:
    """`dtype`: int4 or int8. None where no kernel takes such a weight; torch's own for INT8 is no faster than bf16."""
    functions = load_functions()
    if columns % COLUMNS:
        return None
    if dtype == "int8":
        return None if functions is None or group % WIDTH else native_kernel("int8", functions)
    if group not in GROUPS:
        return None
    return TORCH if functions is None else native_kernel("int4", functions)


def _torch_pack(values: Tensor) -> Tensor:
    unsigned = (values.t().int() + 8).contiguous()  # [out, in]
    return cast(Tensor, torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1))


def _torch_scale(scales: Tensor) -> Tensor:
    rounded = scales.to(torch.bfloat16)
    return torch.stack((rounded, torch.zeros_like(rounded)), dim=-1)


def _torch_multiply(group: int, held: torch.dtype) -> Multiply:
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return lambda x, packed, scales: multiply(x.to(torch.bfloat16).contiguous(), packed, group, scales).to(held)


TORCH = PackedKernel(name="torch", bits=4, most_rows=8, pack=_torch_pack, scale=_torch_scale, multiply=_torch_multiply)


def native_kernel(dtype: str, functions: Functions) -> PackedKernel:
    pairs = functions.takes is torch.bfloat16  # two inputs at once
    if dtype == "int4":
        function, bits, most_rows, pack = functions.int4_linear, 4, 32, _pack_int4
    else:
        function, bits, most_rows = functions.int8_linear, 8, 8 if pairs else 32
        pack = functools.partial(_pack_int8, together=2 if pairs else 4)

    def multiply(group: int, held: torch.dtype) -> Multiply:
        made = torch.bfloat16 if held is torch.bfloat16 else torch.float32

        def run(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
            x = x.to(functions.takes).contiguous()
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

    return PackedKernel(
        name="native", bits=bits, most_rows=most_rows, pack=pack, scale=_native_scale, multiply=multiply
    )


def _pack_int4(values: Tensor) -> Tensor:
    """[out / 16, in / 8, 16, 2] words of four nibbles: see native/linear.c."""
    width, columns = values.shape
    parts = (values.int() + 8).view(width // 8, 4, 2, columns // COLUMNS, COLUMNS).permute(3, 0, 4, 2, 1)
    words = parts[..., 0] | parts[..., 1] << 4 | parts[..., 2] << 8 | parts[..., 3] << 12
    return words.to(torch.int16).contiguous()  # the lower 16 bits


def _pack_int8(values: Tensor, together: int) -> Tensor:
    """[out / 16, in / together, 16, together] bytes."""
    return values.t().reshape(values.shape[1] // COLUMNS, COLUMNS, -1, together).transpose(1, 2).contiguous()


def _native_scale(scales: Tensor) -> Tensor:
    groups, columns = scales.shape
    return scales.float().view(groups, columns // COLUMNS, COLUMNS).transpose(0, 1).contiguous()
