"""Shape arithmetic on Python integers.

A network computes sizes with ordinary layers on tiny int64 tensors. Here such a tensor (rank 0 or 1) is a tuple of
Python integers, which costs a tenth of a torch call and can go straight into a reshape. Rank 0 and a single element of
rank 1 are the same tuple: the declared rank tells them apart where a torch tensor must be made of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.interpreter.operations.site import Kernel, Site

if TYPE_CHECKING:
    from pipeline.network.program import Node, TensorSpec

Ints = tuple[int, ...]
INTEGERS = frozenset({"int32", "int64"})
LARGEST = 16  # elements of a constant that counts as shape arithmetic: twice TensorRT's largest rank


def _truncate(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


BINARY: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "sub": operator.sub,
    "prod": operator.mul,
    "div": _truncate,
    "floor_div": operator.floordiv,
    "max": max,
    "min": min,
}
REDUCTIONS: dict[str, Callable[[Ints], int]] = {"sum": sum, "prod": math.prod, "max": max, "min": min}


def _compile_elementwise(site: Site) -> Kernel:
    function = site.choose("op", BINARY)

    def elementwise(a: Ints, b: Ints) -> Ints:
        if len(a) != len(b):
            a, b = (a * len(b), b) if len(a) == 1 else (a, b * len(a))
        return tuple(function(x, y) for x, y in zip(a, b, strict=True))

    return elementwise


def _compile_gather(site: Site) -> Kernel:
    return lambda values, indices: tuple(values[index] for index in indices)


def _compile_concatenation(site: Site) -> Kernel:
    return lambda *parts: tuple(value for part in parts for value in part)


def _compile_slice(site: Site) -> Kernel:
    def take(values: Ints, *given: Ints | None) -> Ints:
        named = (*given, *[None] * 3)
        start, size, stride = (
            (site.attribute(name) if value is None else value)[0]
            for name, value in zip(("start", "size", "stride"), named[:3], strict=True)
        )
        return tuple(values[start + i * stride] for i in range(size))

    return take


def _compile_reduce(site: Site) -> Kernel:
    function = site.choose("op", REDUCTIONS)
    return lambda values: (function(values),)


def _compile_same(site: Site) -> Kernel:
    return lambda values, *_: values


# Kinds that stay on integers when their inputs are integers, and what else must hold for that.
OPERATIONS: dict[str, tuple[Callable[[Site], Kernel], Callable[[Node], bool]]] = {
    "cast": (_compile_same, lambda node: True),
    "concatenation": (_compile_concatenation, lambda node: True),
    "elementwise": (_compile_elementwise, lambda node: node.attributes["op"] in BINARY),
    "gather": (_compile_gather, lambda node: node.attributes["mode"] == "default"),
    "identity": (_compile_same, lambda node: True),
    "reduce": (_compile_reduce, lambda node: node.attributes["op"] in REDUCTIONS),
    "shuffle": (_compile_same, lambda node: True),  # of rank 0 or 1 to rank 0 or 1: no element moves
    "slice": (_compile_slice, lambda node: node.attributes["mode"] == "strict_bounds" and len(node.inputs) <= 4),
}


def is_small(spec: TensorSpec) -> bool:
    """Whether this tensor can be a tuple of integers at all."""
    return spec.dtype in INTEGERS and len(spec.shape) <= 1


def stays_integer(node: Node, inputs_are_integers: bool) -> bool:
    """Whether a node is shape arithmetic: its kind allows it, and every input is a tuple of integers."""
    if node.kind == "shape":
        return True
    if not inputs_are_integers or node.kind not in OPERATIONS or not all(is_small(spec) for spec in node.outputs):
        return False
    return OPERATIONS[node.kind][1](node)


def compile_integer(site: Site) -> Kernel:
    """The kernel of a node that `stays_integer`."""
    if site.node.kind == "shape":
        return lambda x: tuple(x.shape)
    return OPERATIONS[site.node.kind][0](site)
