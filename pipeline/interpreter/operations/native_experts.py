"""Routed experts in INT4 as one call in C: which of them run, and on which rows, is known only there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.packed import FEWEST_SHARED, Multiply, input_bits
from pipeline.interpreter.operations.site import Kernel, Site

Packed = tuple[Tensor, Tensor, Multiply, int | None]  # weights, scales, the product, up to how many rows it is fast
LINEARS = 3  # fc, up and down


def compile_native(site: Site, packed: list[Packed], prescales: int, kernel: Kernel) -> Kernel:
    """Of weights that all have a kernel in C. `kernel`: for more rows than it is fast with, and whatever else.
    prescales: the input that is the first of them; what follows the last is not to be connected."""
    library, held, mode = load_library(), site.numerics.held(site.attribute("type")), site.numerics.mode
    products = [multiply for _, _, multiply, _ in packed]
    used = any(site.optional(index) is not None for index in range(14, len(site.inputs)))
    if mode != "fast" or library is None or held not in NATIVE or len(packed) != LINEARS or used:
        return kernel
    plans = [product.plan for product in products if isinstance(product, NativeKernel)]
    most_rows = [most for *_, most in packed if most is not None]
    groups = [factors.shape[2] for _, factors, *_ in packed]
    if len(plans) != LINEARS or site.held() is not torch.float32 or groups[0] != groups[1]:
        return kernel
    inside, hidden = site.spec(2).shape[2], site.spec(4).shape[2]

    def plan(empty: Empty, x: Tensor, weights: Tensor, *rest: Any) -> Call | None:
        scales = rest[prescales - 2 : prescales - 2 + LINEARS]
        (experts, rows, _), tensors = weights.shape, [scale for scale in scales if scale is not None]
        if x.dtype is not held or not x.is_contiguous() or weights.dtype is not torch.float32:
            return None
        if any(scale.dtype is not held or not scale.is_contiguous() for scale in tensors):
            return None
        if most_rows and rows > min(most_rows):
            return None
        widths = (hidden, hidden, inside)
        calls = [  # of as many rows as an expert may get, for what they work in
            plan_product(_nothing, _nothing((rows, width), dtype=held), values[0], factors[0])
            for plan_product, width, (values, factors, *_) in zip(plans, widths, packed, strict=True)
        ]
        if any(call is None for call in calls):
            return None
        scratch = max(call.scratch for call in calls if call is not None)
        y = empty((rows, hidden), dtype=torch.float32)
        threads = count_threads(3 * rows * hidden * inside, FEWEST_SHARED)
        stacks = []
        for (values, factors, *_), scale in zip(packed, scales, strict=True):
            steps = 0 if scale is None or len(scale) == 1 else scale.stride(0)
            stacks += [values.data_ptr(), factors.data_ptr(), None if scale is None else scale.data_ptr(), steps]
        return Call(
            kernel="run_experts",
            arguments=(
                held is torch.bfloat16,
                input_bits(rows),
                x.data_ptr(),
                weights.data_ptr(),
                y.data_ptr(),
                experts,
                rows,
                hidden,
                inside,
                weights.stride(0),
                weights.stride(1),
                groups[0],
                groups[2],
                *stacks,
            ),
            outputs=y,
            scratch=8 * threads * rows + 4 * rows * (2 * hidden + 3 * inside) + scratch,
            threads=threads,
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def _nothing(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
