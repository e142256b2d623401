"""In fast mode, in C or for nothing: what lays tensors out anew. A copy takes microseconds, in torch as in C; but what
runs in C is part of the one call that a step is (tape.py).

Each takes the kernel in torch, for what that in C does not take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, Library, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel, view
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.site import Kernel, Site

DIMS = 4  # as in native/small.c
FEWEST_SHARED = 1 << 15  # values, from which on another thread pays


def find_library(site: Site) -> Library | None:
    """Where the mode is fast and the first input one of the floats that it computes in."""
    fast = site.numerics.mode == "fast" and site.numerics.held(site.spec(0).dtype) in NATIVE
    return load_library() if fast else None


def lines(shape: Sequence[int], *strides: Sequence[int]) -> list[list[int]]:
    """The same memory in fewer dimensions, the first but one and those after it, and then filled up to DIMS from the
    front: dimensions, and of each tensor its steps. The first stays apart, for threads to share."""
    dims: list[list[int]] = []  # size and steps
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if len(dims) > 1 and all(outer == step * size for outer, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = [dims[-1][0] * size, *steps]
        else:
            dims.append([size, *steps])
    dims = [[1] + [0] * len(strides)] * (DIMS - len(dims)) + dims
    return [list(column) for column in zip(*dims, strict=True)]


def copy(empty: Empty, x: Tensor, dtype: torch.dtype) -> Call | None:
    """x laid out anew, in a type."""
    if x.dtype not in NATIVE or dtype not in NATIVE or x.dim() > DIMS:
        return None
    y = empty(x.shape, dtype=dtype)
    dims, steps = lines(x.shape, x.stride())
    return Call(
        kernel="copy",
        arguments=(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            dtype is torch.bfloat16,
            y.data_ptr(),
            *dims,
            *steps,
        ),
        outputs=y,
        threads=count_threads(x.numel(), FEWEST_SHARED),
    )


def cast(site: Site, kernel: Kernel) -> Kernel:
    library, held = find_library(site), site.held()
    if library is None or held not in NATIVE:
        return kernel

    def plan(empty: Empty, x: Tensor) -> Call | None:
        return view(x) if x.dtype is held else copy(empty, x, held)

    return NativeKernel(library=library, plan=plan, otherwise=kernel, shares=True)


def slice_view(site: Site, kernel: Kernel) -> Kernel:
    """Of bounds that the network states, one after the other: a part of the same memory."""
    library = find_library(site)
    stated = len(site.inputs) == 1 and all(step == 1 for step in site.attribute("stride"))
    if library is None or not stated:
        return kernel
    return NativeKernel(library=library, plan=lambda _, x: view(kernel(x)), otherwise=kernel, shares=True)


def shuffle(
    site: Site, kernel: Kernel, orders: Sequence[list[int] | None], dims: tuple[int, ...] | None, *, zero_copies: bool
) -> Kernel:
    """The same memory where it can be seen so, else a copy. orders: before and after the reshape to dims."""
    library = find_library(site)
    if library is None or len(site.inputs) != 1:
        return kernel
    first, second = orders

    def plan(empty: Empty, x: Tensor) -> Call | None:
        moved = x if first is None else x.permute(first)
        shape = list(moved.shape if dims is None else dims)
        if zero_copies:
            shape = [size or moved.shape[axis] for axis, size in enumerate(shape)]
        try:
            seen, call = moved.view(shape), view(None)
        except RuntimeError:  # steps that no such view has
            laid_out = copy(empty, moved, moved.dtype)
            if laid_out is None:
                return None
            seen, call = laid_out.outputs.view(shape), laid_out
        return replace(call, outputs=seen if second is None else seen.permute(second))

    return NativeKernel(library=library, plan=plan, otherwise=kernel, shares=True)
