"""Products with constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import is_constant, is_node

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node, TensorSpec

MOST_MERGED = 4  # as many weights as the operation linears_packed takes


def prepare_linear(graph: Graph, node: Node) -> list[Node] | None:
    """A product whose second factor depends on constants only."""
    if node.kind != "matrix_multiply" or node.attributes["op0"] != "none":
        return None
    return [replace(node, kind="linear")] if is_constant(graph, str(node.inputs[1])) else None


def prepare_packed_linear(graph: Graph, node: Node) -> list[Node] | None:
    """x @ dequantize(INT4 [in, out], scales [in / group, out]), or x @ dequantize(INT8 [out, in], scales [out])ᵀ: the
    numbers go to the kernel beside the dequantized weight, which serves where there are many rows."""
    if not is_node(node, "matrix_multiply", op0="none") or len(graph.specs[str(node.inputs[0])].shape) != 2:
        return None
    dequantize = graph.maker(node.inputs[1], "dequantize")
    if dequantize is None or not all(name in graph.constants for name in dequantize.inputs):
        return None
    numbers, scales = (graph.specs[str(name)] for name in dequantize.inputs)
    if not _is_packed(numbers, scales, node.attributes["op1"]):
        return None
    return [replace(node, kind="linear_packed", inputs=(*node.inputs, numbers.name, scales.name))]


def _is_packed(numbers: TensorSpec, scales: TensorSpec, op: str) -> bool:
    if numbers.dtype == "int4":
        return op == "none" and len(scales.shape) == 2 and scales.shape[1] == numbers.shape[1]
    return numbers.dtype == "int8" and op == "transpose" and scales.shape == numbers.shape[:1]


def merge_packed_linears(graph: Graph, node: Node) -> list[Node] | None:
    """Linears of one input (the two of SwiGLU, MLA's two compressions): one product with their weights side by side."""
    if node.kind != "linear_packed":
        return None
    same = [other for other in graph.users(str(node.inputs[0])) if _fits(graph, node, other)][:MOST_MERGED]
    if node not in same or len(same) < 2:
        return None
    if node is not same[0]:
        return []  # the first one makes this one's output
    weights = tuple(name for other in same for name in other.inputs[1:])
    outputs = tuple(other.outputs[0] for other in same)
    return [replace(node, kind="linears_packed", inputs=(node.inputs[0], *weights), outputs=outputs)]


def _fits(graph: Graph, node: Node, other: Node) -> bool:
    if other.kind != "linear_packed" or other.outputs[0].dtype != node.outputs[0].dtype:
        return False
    one, another = ([graph.specs[str(name)] for name in linear.inputs[2:]] for linear in (node, other))
    return one[0].dtype == another[0].dtype and (one[0].dtype == "int8" or one[1].shape[0] == another[1].shape[0])
