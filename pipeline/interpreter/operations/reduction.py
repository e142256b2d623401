"""Along axes: reduce, softmax, top-k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.interpreter.operations import small
from pipeline.interpreter.operations.site import Kernel, Site


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


# torch accumulates 16-bit sums and means in fp32 and rounds once, as TensorRT's kernels do.
REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "sum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep),
    "avg": lambda x, axes, keep: torch.mean(x, axes, keepdim=keep),
    "max": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "min": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "prod": _prod,
}


def compile_reduce(site: Site) -> Kernel:
    reduction, axes = site.choose("op", REDUCTIONS), site.axes()
    keep, held = bool(site.attribute("keep_dims")), site.held()
    return small.reduce(site, lambda x: reduction(x, axes, keep).to(held))  # torch widens integer sums to int64


def compile_softmax(site: Site) -> Kernel:
    axes = site.axes()
    if len(axes) != 1:
        raise site.refuse(f"over {len(axes)} axes at once")
    axis = axes[0]
    return small.score(site, lambda x: torch.softmax(x, axis), is_sigmoid=False)


def compile_topk(site: Site) -> Kernel:
    """Values and indices, sorted. Input 1, where given, is k. Ties fall as torch.topk has them, in fast mode to the
    first."""
    largest = site.choose("op", {"max": True, "min": False})
    axes, held = site.axes(), site.held(1)
    if len(axes) != 1:
        raise site.refuse(f"over {len(axes)} axes at once")
    axis, static_k = axes[0], int(site.attribute("k"))

    def topk(x: Tensor, k: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, static_k if k is None else k[0], axis, largest=largest, sorted=True)
        return values, indices.to(held)

    return small.top(site, topk, axis, static_k)
