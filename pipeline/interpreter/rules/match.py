"""What the rules are made of: questions about nodes, and the nodes that a rule splits off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.network.program import Node, TensorSpec

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph


def part(
    node: Node,
    kind: str,
    inputs: tuple[str | None, ...],
    shape: tuple[int, ...],
    attributes: Mapping[str, Any],
    dtype: str = "int64",
) -> Node:
    """A node that a rule splits off; "#" keeps its name apart from the network's."""
    spec = TensorSpec(f"{node.name}#{kind}", dtype, shape)
    return Node(kind=kind, name=node.name, inputs=inputs, outputs=(spec,), attributes=attributes)


def is_node(node: Node, kind: str, **attributes: object) -> bool:
    return node.kind == kind and all(node.attributes[name] == value for name, value in attributes.items())


def maker_of(graph: Graph, name: str | None, kind: str, **attributes: object) -> Node | None:
    node = graph.maker(name, kind)
    return node if node is not None and is_node(node, kind, **attributes) else None


def through_cast(graph: Graph, name: str | None) -> str | None:
    """The tensor before a cast, where one made this tensor."""
    cast = graph.maker(name, "cast")
    return name if cast is None else cast.inputs[0]


def is_constant(graph: Graph, name: str) -> bool:
    if name in graph.constants:
        return True
    node = graph.makers.get(name)
    return node is not None and all(source is not None and is_constant(graph, source) for source in node.inputs)
