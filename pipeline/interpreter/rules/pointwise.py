"""Chains of element-by-element nodes that become one: RMSNorm, the gate of SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import is_node, maker_of, through_cast

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node


def fuse_norm(graph: Graph, node: Node) -> list[Node] | None:
    """x / sqrt(mean(x²) + eps), in fp32 with the casts around it, times a weight (RMSNorm, arXiv 1910.07467)."""
    if not is_node(node, "elementwise", op="prod"):
        return None
    normal, weight = node.inputs
    ratio = maker_of(graph, through_cast(graph, normal), "elementwise", op="div")
    if ratio is None:
        return None
    wide, root = ratio.inputs
    square_root = maker_of(graph, root, "unary", op="sqrt")
    variance = square_root and maker_of(graph, square_root.inputs[0], "elementwise", op="sum")
    if variance is None:
        return None
    mean, eps = variance.inputs
    rank = len(graph.specs[str(wide)].shape)
    average = maker_of(graph, mean, "reduce", op="avg", axes=[rank - 1], keep_dims=True)
    square = average and maker_of(graph, average.inputs[0], "elementwise", op="prod")
    if square is None or square.inputs != (wide, wide) or graph.specs[str(wide)].dtype != "float32":
        return None
    source = through_cast(graph, wide)
    attributes = {"normal": graph.specs[str(normal)].dtype}
    return [replace(node, kind="rms_norm", inputs=(source, weight, eps), attributes=attributes)]


def sum_and_norm(graph: Graph, node: Node) -> list[Node] | None:
    """What is added to the residual stream, and the norm of the sum: at once."""
    if is_node(node, "elementwise", op="sum"):
        norms = [user for user in graph.users(node.outputs[0].name) if _sum_normed(graph, user) is node]
        return [] if norms else None
    total = _sum_normed(graph, node)
    if total is None:
        return None
    outputs = (total.outputs[0], node.outputs[0])
    return [replace(node, kind="sum_norm", inputs=(*total.inputs, *node.inputs[1:]), outputs=outputs)]


def _sum_normed(graph: Graph, norm: Node) -> Node | None:
    """The sum of two tensors of one shape and type that this node is the first to norm."""
    total = maker_of(graph, norm.inputs[0], "elementwise", op="sum") if norm.kind == "rms_norm" else None
    if total is None:
        return None
    specs = [graph.specs[str(name)] for name in (*total.inputs, total.outputs[0].name, norm.outputs[0].name)]
    first = next(user for user in graph.users(total.outputs[0].name) if user.kind == "rms_norm")
    return total if first is norm and len({(spec.shape, spec.dtype) for spec in specs}) == 1 else None


def fuse_gate(graph: Graph, node: Node) -> list[Node] | None:
    """(g * sigmoid(g)) * u, all of one shape (SwiGLU, arXiv 2002.05202)."""
    if not is_node(node, "elementwise", op="prod"):
        return None
    for silu, up in (node.inputs, node.inputs[::-1]):
        product = maker_of(graph, silu, "elementwise", op="prod")
        for gate, sigmoid in (product.inputs, product.inputs[::-1]) if product else ():
            activation = maker_of(graph, sigmoid, "activation", op="sigmoid")
            shapes = {graph.specs[str(name)].shape for name in (gate, up, node.outputs[0].name)}
            if activation is not None and activation.inputs[0] == gate and len(shapes) == 1:
                return [replace(node, kind="gate", inputs=(gate, up), attributes={})]
    return None
