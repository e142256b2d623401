"""Data movement: gather, shuffle, slice, concatenation. Views wherever torch has one.

Dimensions, starts and sizes that the network computes arrive as tuples of Python integers (see host.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.interpreter.operations import layouts, small
from pipeline.interpreter.operations.site import Kernel, Site

Ints = tuple[int, ...]


def compile_gather(site: Site) -> Kernel:
    """As ONNX Gather, GatherElements and GatherND; negative indices count from the end."""
    modes = {"default": _compile_gather_default, "element": _compile_gather_element, "nd": _compile_gather_nd}
    compile_mode = site.choose("mode", modes)
    site.require("num_elementwise_dims", 0)
    return compile_mode(site)


def _compile_gather_default(site: Site) -> Kernel:
    axis, flat, held = site.axis(), site.rank(1) == 1, site.held()

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        rows = select_rows(x, axis, indices if flat else indices.reshape(-1)).to(held)
        return rows if flat else rows.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

    return gather


def select_rows(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    """index_select, which refuses negative indices: only then are they wrapped."""
    try:
        return torch.index_select(x, axis, indices)
    except (IndexError, RuntimeError):  # which of them depends on the shape
        return torch.index_select(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _compile_gather_element(site: Site) -> Kernel:
    axis, held = site.axis(), site.held()

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        wide = indices.to(torch.int64)
        return torch.gather(x, axis, torch.where(wide < 0, wide + x.shape[axis], wide)).to(held)

    return small.pick(site, gather)


def _compile_gather_nd(site: Site) -> Kernel:
    held = site.held()
    return lambda x, indices: x[indices.to(torch.int64).unbind(-1)].to(held)


def compile_shuffle(site: Site) -> Kernel:
    """Transpose, reshape, transpose. Input 1, where connected, holds the reshape dimensions."""
    rank_out, computed = len(site.node.outputs[0].shape), site.optional(1) is not None
    first = _permutation(site, "first_transpose", site.rank())
    second = _permutation(site, "second_transpose", rank_out)
    static: Ints | None = None
    if not computed and (dims := site.attribute("reshape_dims")) is not None and (dims or rank_out == 0):
        static = tuple(int(size) for size in dims)
    zero_copies = bool(site.attribute("zero_is_placeholder")) and (computed or (static is not None and 0 in static))

    def shuffle(x: Tensor, dims: Ints | None = static) -> Tensor:
        if first is not None:
            x = x.permute(first)
        if dims is not None:
            x = x.reshape(resolve(dims, x.shape) if zero_copies else dims)
        return x if second is None else x.permute(second)

    return layouts.shuffle(site, shuffle, (first, second), static, zero_copies=zero_copies)


def _permutation(site: Site, name: str, rank: int) -> list[int] | None:
    if (order := site.attribute(name)) is None:
        return None
    if sorted(order) != list(range(rank)):
        raise site.refuse(f"{name} {order} is no permutation of {rank} dimensions")
    return [int(axis) for axis in order]


def resolve(dims: Ints, shape: Sequence[int]) -> Ints:
    """Replaces each 0 by the input's dimension at that place."""
    return tuple(shape[axis] if size == 0 else size for axis, size in enumerate(dims))


def compile_slice(site: Site) -> Kernel:
    """Inputs 1, 2, 3, where connected, override start, size and stride; a stride of 0 repeats one element."""
    site.require("mode", "strict_bounds")
    if site.optional(4) is not None or site.optional(5) is not None:
        raise site.refuse("with a fill value or computed axes")
    axes = [int(axis) for axis in site.attribute("axes") or range(site.rank())]
    static = [
        () if site.optional(index) is not None else tuple(site.attribute(name))
        for index, name in enumerate(("start", "size", "stride"), start=1)
    ]

    def take(x: Tensor, start: Ints | None = None, size: Ints | None = None, stride: Ints | None = None) -> Tensor:
        begin, count, step = (static[i] if v is None else v for i, v in enumerate((start, size, stride)))
        for axis, first, n, by in zip(axes, begin, count, step, strict=True):
            x = _take_axis(x, axis, first, n, by)
        return x

    return layouts.slice_view(site, take)


def _take_axis(x: Tensor, axis: int, first: int, count: int, by: int) -> Tensor:
    size = x.shape[axis]
    if by == 1:
        return x if first == 0 and count == size else x.narrow(axis, first, count)
    if by == 0:
        return x.narrow(axis, first, 1).expand([count if i == axis else -1 for i in range(x.dim())])
    last = first + (count - 1) * by
    if count and not (0 <= first < size and 0 <= last < size):
        raise IndexError(f"slice from {first} to {last} leaves dimension {axis} of size {size}")
    return torch.index_select(x, axis, torch.arange(count) * by + first)


def compile_concatenation(site: Site) -> Kernel:
    axis = site.axis()
    return lambda *parts: torch.cat(parts, axis)


def compile_identity(site: Site) -> Kernel:
    return lambda x: x
