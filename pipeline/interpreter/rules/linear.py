"""Products with constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import is_constant, is_node

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node

MOST_MERGED = 4  # as many weights as the operation linears_int4 takes


def prepare_linear(graph: Graph, node: Node) -> list[Node] | None:
    """A product whose second factor depends on constants only."""
    if node.kind != "matrix_multiply" or node.attributes["op0"] != "none":
        return None
    return [replace(node, kind="linear")] if is_constant(graph, str(node.inputs[1])) else None


def prepare_int4_linear(graph: Graph, node: Node) -> list[Node] | None:
    """x @ dequantize(INT4 [in, out], scales [in / group, out]): the packed weight goes to the kernel beside the
    dequantized one, which serves where there are many rows."""
    if not is_node(node, "matrix_multiply", op0="none", op1="none") or len(graph.specs[str(node.inputs[0])].shape) != 2:
        return None
    dequantize = graph.maker(node.inputs[1], "dequantize")
    if dequantize is None or not all(name in graph.constants for name in dequantize.inputs):
        return None
    packed, scales = (graph.specs[str(name)] for name in dequantize.inputs)
    if packed.dtype != "int4" or len(scales.shape) != 2 or scales.shape[1] != packed.shape[1]:
        return None
    return [replace(node, kind="linear_int4", inputs=(*node.inputs, packed.name, scales.name))]


def merge_int4_linears(graph: Graph, node: Node) -> list[Node] | None:
    """Linears of one input (the two of SwiGLU, MLA's two compressions): one product with their weights side by side."""
    if node.kind != "linear_int4":
        return None
    same = [other for other in graph.users(str(node.inputs[0])) if _fits(graph, node, other)][:MOST_MERGED]
    if node not in same or len(same) < 2:
        return None
    if node is not same[0]:
        return []  # the first one makes this one's output
    weights = tuple(name for other in same for name in other.inputs[1:])
    outputs = tuple(other.outputs[0] for other in same)
    return [replace(node, kind="linears_int4", inputs=(node.inputs[0], *weights), outputs=outputs)]


def _fits(graph: Graph, node: Node, other: Node) -> bool:
    if other.kind != "linear_int4" or other.outputs[0].dtype != node.outputs[0].dtype:
        return False
    groups = {graph.specs[str(linear.inputs[3])].shape[0] for linear in (node, other)}
    return len(groups) == 1
