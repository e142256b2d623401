"""Kernels that multiply few rows by INT4 or INT8 weights as they are packed: a quarter or half of the memory of 16-bit
ones is read.

in, out: width of the input and number of outputs. group: inputs that share a scale, all of them in INT8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, Library, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE, multiplied_as

GROUPS, COLUMNS = (32, 64, 128, 256), 16  # what both INT4 kernels take; columns in multiples
WIDTH = 8  # … and inputs of the INT8 kernel
PARTS = {16: 128, 8: 32}  # by the bits of an input: how many native/linear.c rounds together
# From so many rows on, as prompts have them, INT4 weights multiply inputs of 8 bits, which takes 0.6 of the time. Fewer
# keep 16 bits, which cost them little: there the weights are what is waited for.
FEWEST_SHORT = 33
FEWEST_SHARED = 1 << 20  # multiplications, from which on another thread pays

# x [rows, in], packed, scales → [rows, out]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def input_bits(rows: int) -> int:
    """To how many bits INT4 weights in C have inputs rounded, where there are so many rows."""
    return 8 if rows >= FEWEST_SHORT else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKernel:
    """most_rows: up to which it beats a product with weights dequantized before; None where it does for any number.
    bits: of a weight. pack: values [in, out] → as the kernel reads them; scale: [in / group, out] → the same.
    multiply(group, held): the product, in the type `held`, one of NATIVE; sums are fp32."""

    name: str
    bits: int
    most_rows: int | None
    pack: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    multiply: Callable[[int, torch.dtype], Multiply]


def pick_kernel(dtype: str, group: int, columns: int) -> PackedKernel | None:
    """`dtype`: int4 or int8. None where no kernel takes such a weight; torch's own for INT8 is no faster than bf16."""
    library = load_library()
    if columns % COLUMNS:
        return None
    if dtype == "int8":
        return None if library is None or group % WIDTH else native_kernel("int8", library)
    if group not in GROUPS:
        return None
    return TORCH if library is None else native_kernel("int4", library)


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


def native_kernel(dtype: str, library: Library) -> PackedKernel:
    """Integer products in C (native/linear.c). Where the processor is fast in bf16, many rows are faster in it: of INT8
    fewer, because a bf16 weight is but twice as long."""
    bits, fewest_fast, pack = (4, 32, _pack_int4) if dtype == "int4" else (8, 8, _pack_int8)

    def multiply(group: int, held: torch.dtype) -> NativeKernel:
        def plan(empty: Empty, x: Tensor, packed: Tensor, scales: Tensor) -> Call | None:
            if x.dtype not in NATIVE or not x.is_contiguous():
                return None
            (rows, width), columns, groups = x.shape, scales.shape[0] * COLUMNS, x.shape[1] // group
            wide = input_bits(rows) if bits == 4 else 16
            words = width * wide // 32 + groups * (2 * -(-group // PARTS[wide]) + 1)
            y = empty((rows, columns), dtype=held)
            return Call(
                kernel="linear",
                arguments=(
                    bits,
                    wide,
                    x.dtype is torch.bfloat16,
                    x.data_ptr(),
                    packed.data_ptr(),
                    scales.data_ptr(),
                    held is torch.bfloat16,
                    y.data_ptr(),
                    rows,
                    width,
                    columns,
                    groups,
                ),
                outputs=y,
                scratch=4 * rows * words,
                threads=count_threads(rows * width * columns, FEWEST_SHARED),
            )

        def widened(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
            y: Tensor = kernel(x.float(), packed, scales)
            return y

        kernel = NativeKernel(library=library, plan=plan, otherwise=widened)
        return kernel

    return PackedKernel(
        name="native",
        bits=bits,
        most_rows=fewest_fast if multiplied_as(torch.bfloat16) is torch.bfloat16 else None,
        pack=pack,
        scale=_native_scale,
        multiply=multiply,
    )


def _pack_int4(values: Tensor) -> Tensor:
    """[out / 16, in / 8, 16, 2] words of four nibbles: see native/linear.c."""
    width, columns = values.shape
    parts = (values.int() + 8).view(width // 8, 4, 2, columns // COLUMNS, COLUMNS).permute(3, 0, 4, 2, 1)
    words = parts[..., 0] | parts[..., 1] << 4 | parts[..., 2] << 8 | parts[..., 3] << 12
    return words.to(torch.int16).contiguous()  # the lower 16 bits


def _pack_int8(values: Tensor) -> Tensor:
    """[out / 16, in / 4, 16, 2, 2] bytes, inputs 0, 2, 1 and 3 of four."""
    width, columns = values.shape
    return values.t().reshape(columns // COLUMNS, COLUMNS, width // 4, 2, 2).permute(0, 2, 1, 4, 3).contiguous()


def _native_scale(scales: Tensor) -> Tensor:
    groups, columns = scales.shape
    return scales.float().view(groups, columns // COLUMNS, COLUMNS).transpose(0, 1).contiguous()
