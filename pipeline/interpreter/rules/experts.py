"""Routed experts in their dense form: every expert on every row, and most results times zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import is_node, maker_of, through_cast

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node


# Weights of an expert's matrix from which on it is worth running experts one by one; smaller ones cost less in one
# batched product than in as many calls.
WORTH_SKIPPING = 1 << 16


@dataclass(frozen=True, slots=True)
class _Stack:
    """A product with one weight [in, out] (or its transpose) per expert, and a scale of its input before it."""

    rows: str
    prescale: str | None
    weight: str
    transposed: bool
    packed: tuple[str | None, str | None]


def skip_experts(graph: Graph, node: Node) -> list[Node] | None:
    """sum over experts of weights [E, T, 1] * down(gate(fc(x), up(x))): an expert runs on the rows that give it a
    weight other than zero, the others' zeros are not added.

    The same sum, as long as no expert's result is infinite or NaN on a row that does not want it."""
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
    count, *matrix = graph.specs[down.weight].shape
    if math.prod(matrix) < WORTH_SKIPPING:
        return None
    rows, share = graph.specs[fc.rows].shape, graph.specs[str(weights)].shape
    if len(rows) != 3 or rows[0] != 1 or share != (count, -1, 1):
        return None
    stacks = (fc, up, down)
    if any(graph.specs[stack.weight].shape[0] != count for stack in stacks):
        return None
    inputs = (
        fc.rows,
        weights,
        *(stack.weight for stack in stacks),
        *(stack.prescale for stack in stacks),
        *(name for stack in stacks for name in stack.packed),
    )
    attributes = {
        "transposed": [stack.transposed for stack in stacks],
        "type": graph.specs[str(through_cast(graph, outputs))].dtype,
    }
    return [replace(node, kind="chosen_experts", inputs=inputs, attributes=attributes)]


def _stack(graph: Graph, name: str | None) -> _Stack | None:
    product = maker_of(graph, name, "linear", op0="none")
    if product is None or len(product.outputs[0].shape) != 3:
        return None
    rows, weight = (str(source) for source in product.inputs)
    prescale = None
    scaled = maker_of(graph, rows, "elementwise", op="prod")
    if scaled is not None and scaled.inputs[1] in graph.constants:
        rows, prescale = str(scaled.inputs[0]), scaled.inputs[1]
    dequantize = graph.maker(weight, "dequantize")
    packed: tuple[str | None, str | None] = (None, None)
    if dequantize is not None and all(source in graph.constants for source in dequantize.inputs):
        packed = (dequantize.inputs[0], dequantize.inputs[1])
    return _Stack(rows, prescale, weight, product.attributes["op1"] == "transpose", packed)
