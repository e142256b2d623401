"""Products with 16-bit or wide constants in C: of each head with its own matrix, or of rows with one. Weights are read
as they are stored, which for few rows is what a product costs.

h heads, T rows, in and out: widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE, multiplied_as
from pipeline.interpreter.operations.site import Kernel, Site

COLUMNS = 16  # outputs in multiples
FEWEST_SHARED = 1 << 18  # multiplications, from which on another thread pays
MOST_ROWS_BF16 = 8  # where the processor is fast in bf16; else this is as fast as torch's products for any number
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of native/vectors.h


def compile_heads(site: Site, otherwise: Callable[[], Kernel]) -> Kernel | None:
    """x [h or 1, T, in] times a constant [h, in, out], or [T, in] times [in, out]; op1 says where it is transposed.
    None where the kernel in C does not take it. `otherwise` compiles what is faster with many rows."""
    held, library, rank = site.held(), load_library(), site.rank(1)
    transposed = site.attribute("op1") == "transpose"
    shape = site.spec(1).shape
    out = shape[-2 if transposed else -1]
    fits = rank in (2, 3) and site.rank(0) == rank and out % COLUMNS == 0
    if site.numerics.mode != "fast" or library is None or held not in NATIVE or not fits:
        return None
    weight = site.constant(1)
    if weight is None or weight.dtype not in NATIVE:
        return None
    kept = weight
    stored = narrowest(kept)

    def pack() -> Tensor:
        values = (kept.transpose(-1, -2) if transposed else kept).to(stored)
        heads = values.unsqueeze(0) if rank == 2 else values
        blocks = heads.reshape(*heads.shape[:2], -1, COLUMNS)
        return blocks.transpose(1, 2).contiguous()  # [h, out / 16, in, 16]

    packed = site.prepare(1, f"heads {transposed}", kept.numel() * stored.itemsize, pack)
    if packed is None:
        return None
    kernel = native_heads(packed, rank, held)
    if multiplied_as(torch.bfloat16) is not torch.bfloat16:
        return kernel
    plan, many = kernel.plan, otherwise()

    def plan_few(empty: Empty, x: Tensor, *rest: Tensor | None) -> Call | None:
        return plan(empty, x, *rest) if x.shape[-2] <= MOST_ROWS_BF16 else None

    return replace(kernel, plan=plan_few, otherwise=many)


def narrowest(weight: Tensor) -> torch.dtype:
    """The type of 16 bits that says the same, where one does; of what is not finite none, which the kernel does not
    widen everywhere."""
    if not weight.isfinite().all():
        return torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return torch.float32


def native_heads(packed: Tensor, rank: int, held: torch.dtype) -> NativeKernel:
    """Of weights packed as native/heads.c reads them."""
    library = load_library()
    assert library is not None
    count, blocks, width, _ = packed.shape

    def plan(empty: Empty, x: Tensor, _: Tensor | None = None) -> Call | None:
        rows = x.shape[-2]
        if rank == 3 and len(x) == 1:
            x = x.expand(count, rows, width)
        if x.dtype not in NATIVE or x.stride(-1) != 1 or x.shape != (*([count] if rank == 3 else []), rows, width):
            return None
        out = blocks * COLUMNS
        y = empty((rows, out) if rank == 2 else (rows, count, out), dtype=held)
        return Call(
            kernel="multiply_heads",
            arguments=(
                TYPES.index(packed.dtype),
                x.dtype is torch.bfloat16,
                x.data_ptr(),
                packed.data_ptr(),
                held is torch.bfloat16,
                y.data_ptr(),
                count,
                rows,
                width,
                out,
                0 if rank == 2 else x.stride(0),
                x.stride(-2),
                out,
                count * out,
            ),
            outputs=y if rank == 2 else y.transpose(0, 1),
            threads=count_threads(count * rows * width * out, FEWEST_SHARED),
        )

    def widened(x: Tensor, _: Tensor | None = None) -> Tensor:
        if x.dtype in NATIVE:
            raise ValueError(f"a product of {list(x.shape)} with {count} matrices of {width} rows")
        y: Tensor = kernel(x.float())
        return y

    kernel = NativeKernel(library=library, plan=plan, otherwise=widened)
    return kernel
