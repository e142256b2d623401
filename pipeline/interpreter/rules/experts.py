"""Routed experts in their dense form: every expert on every row, and most results times zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.interpreter.native import load_library
from pipeline.interpreter.rules.match import is_node, maker_of, through_cast

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node


# Weights of an expert's matrix from which on it is worth running experts one by one; smaller ones cost less in one
# batched product than in as many calls.
WORTH_SKIPPING = 1 << 16


@dataclass(frozen=True, slots=True)
class _Stack:
    """A product with one weight [in, out] (or its transpose) per expert. Before it its input is scaled, and rounded in
    steps to a type; behind it each expert's outputs are multiplied by factors."""

    rows: str
    prescale: str | None
    step: str | None
    rounded: str | None
    weight: str
    transposed: bool
    packed: tuple[str | None, str | None]
    factors: str | None


def skip_packed_experts(graph: Graph, node: Node) -> list[Node] | None:
    """The same of any size where it is one call in C."""
    native = load_library() is not None
    return _skip(graph, node, lambda stacks: native and all(all(stack.packed) for stack in stacks))


def skip_experts(graph: Graph, node: Node) -> list[Node] | None:
    """sum over experts of weights [E, T, 1] * down(gate(fc(x), up(x))): an expert runs on the rows that give it a
    weight other than zero, the others' zeros are not added.

    The same sum, as long as no expert's result is infinite or NaN on a row that does not want it."""
    return _skip(graph, node, lambda stacks: math.prod(graph.specs[stacks[-1].weight].shape[1:]) >= WORTH_SKIPPING)


def _skip(graph: Graph, node: Node, is_worth_it: Callable[[Sequence[_Stack]], bool]) -> list[Node] | None:
    if not is_node(node, "reduce", op="sum", axes=[0], keep_dims=False):
        return None
    weighted = maker_of(graph, node.inputs[0], "elementwise", op="prod")
    if weighted is None or graph.specs[weighted.outputs[0].name].dtype != "float32":
        return None
    outputs, weights = weighted.inputs
    down = _stack(graph, through_cast(graph, outputs))
    if down is None or (gate := maker_of(graph, down.rows, "gate")) is None:
        return None
    fc, up = (_stack(graph, name) for name in gate.inputs)
    if fc is None or up is None or fc.rows != up.rows:
        return None
    count = graph.specs[down.weight].shape[0]
    if not is_worth_it((fc, up, down)):
        return None
    rows, share = graph.specs[fc.rows].shape, graph.specs[str(weights)].shape
    if len(rows) != 3 or rows[0] != 1 or share != (count, -1, 1):
        return None
    stacks = (fc, up, down)
    if any(graph.specs[stack.weight].shape[0] != count for stack in stacks):
        return None
    if any(stack.factors and graph.specs[stack.factors].shape[:2] != (count, 1) for stack in stacks):
        return None
    inputs = (
        fc.rows,
        weights,
        *(stack.weight for stack in stacks),
        *(stack.prescale for stack in stacks),
        *(name for stack in stacks for name in stack.packed),
        *(stack.step for stack in stacks),
        *(stack.factors for stack in stacks),
    )
    attributes = {
        "transposed": [stack.transposed for stack in stacks],
        "rounded": [stack.rounded for stack in stacks],
        "type": graph.specs[str(through_cast(graph, outputs))].dtype,
    }
    return [replace(node, kind="chosen_experts", inputs=inputs, attributes=attributes)]


def _stack(graph: Graph, name: str | None) -> _Stack | None:
    factors, step, rounded, prescale = None, None, None, None
    multiplied = maker_of(graph, through_cast(graph, name), "elementwise", op="prod")
    if multiplied is not None and multiplied.inputs[1] in graph.constants:
        name, factors = through_cast(graph, multiplied.inputs[0]), multiplied.inputs[1]
    product = maker_of(graph, name, "linear", op0="none")
    if product is None or len(product.outputs[0].shape) != 3:
        return None
    rows, weight = (str(source) for source in product.inputs)
    back = graph.maker(rows, "dequantize")
    forth = graph.maker(back.inputs[0], "quantize") if back is not None else None
    if back is not None and forth is not None:
        if forth.inputs[1] != back.inputs[1] or graph.specs[str(back.inputs[1])].shape != (1,):
            return None
        rows, step, rounded = str(forth.inputs[0]), back.inputs[1], forth.outputs[0].dtype
    scaled = maker_of(graph, rows, "elementwise", op="prod")
    if scaled is not None and scaled.inputs[1] in graph.constants:
        rows, prescale = str(scaled.inputs[0]), scaled.inputs[1]
    dequantize = graph.maker(weight, "dequantize")
    packed: tuple[str | None, str | None] = (None, None)
    if dequantize is not None and all(source in graph.constants for source in dequantize.inputs):
        packed = (dequantize.inputs[0], dequantize.inputs[1])
    transposed = product.attributes["op1"] == "transpose"
    return _Stack(rows, prescale, step, rounded, weight, transposed, packed, factors)
