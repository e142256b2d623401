"""In fast mode, in C: what a router is made of. Each takes microseconds, in torch as in C; but what runs in C is part
of the one call that a step is (tape.py).

Each takes the kernel in torch, for what that in C does not take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.layouts import DIMS, FEWEST_SHARED, find_library, lines
from pipeline.interpreter.operations.site import Kernel, Site

OPERATIONS = ("sum", "prod", "sub", "div", "max", "min", "avg")  # in the order of native/small.c


def elementwise(site: Site, kernel: Kernel) -> Kernel:
    library, op = find_library(site), site.attribute("op")
    if library is None or op not in OPERATIONS or site.rank() > DIMS:
        return kernel

    def plan(empty: Empty, a: Tensor, b: Tensor) -> Call | None:
        if a.dtype is not b.dtype or a.dtype not in NATIVE:
            return None
        shape = [max(sizes) if min(sizes) else 0 for sizes in zip(a.shape, b.shape, strict=True)]
        a, b, y = a.expand(shape), b.expand(shape), empty(shape, dtype=a.dtype)
        dims, a_steps, b_steps = lines(shape, a.stride(), b.stride())
        return Call(
            kernel="elementwise",
            arguments=(
                OPERATIONS.index(op),
                a.dtype is torch.bfloat16,
                a.data_ptr(),
                b.data_ptr(),
                y.data_ptr(),
                *dims,
                *a_steps,
                *b_steps,
            ),
            outputs=y,
            threads=count_threads(y.numel(), FEWEST_SHARED),
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def reduce(site: Site, kernel: Kernel) -> Kernel:
    """Along one axis, of fp32."""
    library, op, axes = find_library(site), site.attribute("op"), site.axes()
    if library is None or op not in ("sum", "avg", "max", "min") or len(axes) != 1:
        return kernel
    (axis,), keep = axes, bool(site.attribute("keep_dims"))

    def plan(empty: Empty, x: Tensor) -> Call | None:
        if not _is_plain(x) or not x.shape[axis]:
            return None
        outer, count, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
        y = empty((*x.shape[:axis], *([1] if keep else []), *x.shape[axis + 1 :]), dtype=x.dtype)
        return Call(
            kernel="reduce",
            arguments=(OPERATIONS.index(op), x.data_ptr(), y.data_ptr(), outer, count, inner),
            outputs=y,
            threads=count_threads(x.numel(), FEWEST_SHARED),
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def score(site: Site, kernel: Kernel, *, is_sigmoid: bool) -> Kernel:
    """Softmax of rows, or sigmoids, of fp32."""
    library = find_library(site)
    if library is None or not (is_sigmoid or site.axes() == [site.rank() - 1]):
        return kernel

    def plan(empty: Empty, x: Tensor) -> Call | None:
        if not _is_plain(x) or not x.dim() or not x.numel():
            return None
        y = empty(x.shape, dtype=x.dtype)
        return Call(
            kernel="score_rows",
            arguments=(is_sigmoid, x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1], x.shape[-1]),
            outputs=y,
            threads=count_threads(x.numel(), FEWEST_SHARED),
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def top(site: Site, kernel: Kernel, axis: int, count: int) -> Kernel:
    """The largest of each row of fp32. Of equal ones the first comes first."""
    library, held = find_library(site), site.held(1)
    if library is None or site.attribute("op") != "max" or axis != site.rank() - 1 or len(site.inputs) != 1:
        return kernel

    def plan(empty: Empty, x: Tensor) -> Call | None:
        if not _is_plain(x) or held is not torch.int32 or not 0 < count <= x.shape[-1]:
            return None
        values, places = (empty((*x.shape[:-1], count), dtype=dtype) for dtype in (x.dtype, held))
        threads = count_threads(x.numel() * count, FEWEST_SHARED)
        width = x.shape[-1]
        return Call(
            kernel="top",
            arguments=(
                x.data_ptr(),
                values.data_ptr(),
                places.data_ptr(),
                x.numel() // width,
                width,
                count,
            ),
            outputs=(values, places),
            scratch=threads * width,
            threads=threads,
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def one_hot(site: Site, kernel: Kernel, axis: int) -> Kernel:
    """fp32 of int32, as the last dimension."""
    library = load_library() if site.numerics.mode == "fast" else None
    if library is None or axis != site.rank():
        return kernel

    def plan(empty: Empty, indices: Tensor, values: Tensor, depth: tuple[int, ...]) -> Call | None:
        if indices.dtype is not torch.int32 or not indices.is_contiguous() or not _is_plain(values):
            return None
        y = empty((*indices.shape, depth[0]), dtype=values.dtype)
        addresses = (indices.data_ptr(), values.data_ptr(), y.data_ptr())
        return Call(
            kernel="one_hot",
            arguments=(*addresses, indices.numel(), depth[0]),
            outputs=y,
            threads=count_threads(y.numel(), FEWEST_SHARED),
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def pick(site: Site, kernel: Kernel) -> Kernel:
    """The values of each row of fp32 at places of int32."""
    library = find_library(site)
    if library is None or site.axis() != site.rank() - 1:
        return kernel

    def plan(empty: Empty, x: Tensor, indices: Tensor) -> Call | None:
        if indices.dtype is not torch.int32 or not indices.is_contiguous() or not _is_plain(x):
            return None
        if indices.shape[:-1] != x.shape[:-1]:
            return None
        y = empty(indices.shape, dtype=x.dtype)
        addresses = (x.data_ptr(), indices.data_ptr(), y.data_ptr())
        return Call(
            kernel="pick",
            arguments=(*addresses, math.prod(x.shape[:-1]), x.shape[-1], indices.shape[-1]),
            outputs=y,
            threads=count_threads(y.numel(), FEWEST_SHARED),
            refusal=f"indices that are none of {x.shape[-1]} values",
        )

    return NativeKernel(library=library, plan=plan, otherwise=kernel)


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()
