"""A program as something to rewrite: who makes and who uses each tensor, and the passes that only remove work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.interpreter.errors import UnsupportedLayerError
from plugins.registry import updated_inputs

if TYPE_CHECKING:
    from pipeline.interpreter.numerics import Numerics
    from pipeline.network.program import Node, Program, TensorSpec

# Kinds that write to an input; the plugins that do know it themselves.
IN_PLACE = {"kv_cache_update": (0,), "write_cache_rows": (0,), "rotate_into_cache": (3, 4), "write_joined": (4,)}


def updates(node: Node) -> tuple[int, ...]:
    """The inputs that a node writes to: it is never merged, never folded."""
    if node.kind in IN_PLACE:
        return IN_PLACE[node.kind]
    return updated_inputs(node.kind, node.attributes)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order. `wanted` are the tensors that must exist under their own names: outputs and taps."""

    nodes: tuple[Node, ...]
    specs: Mapping[str, TensorSpec]
    constants: frozenset[str]
    wanted: frozenset[str]
    makers: Mapping[str, Node]
    readers: Mapping[str, tuple[Node, ...]]

    @staticmethod
    def of(program: Program, taps: Iterable[str]) -> Graph:
        wanted = frozenset(spec.name for spec in program.outputs) | frozenset(taps)
        specs = program.tensors
        graph = Graph(program.nodes, specs, frozenset(program.constants), wanted, {}, {})
        _check_in_place(program)
        twins = _find_twins(program)
        return graph.with_nodes(
            replace(node, inputs=tuple(twins.get(name, name) if name else None for name in node.inputs))
            for node in program.nodes
        )

    def with_nodes(self, nodes: Iterable[Node]) -> Graph:
        nodes = tuple(nodes)
        makers = {spec.name: node for node in nodes for spec in node.outputs}
        specs = {**self.specs, **{spec.name: spec for node in nodes for spec in node.outputs}}
        readers: dict[str, list[Node]] = {}
        for node in nodes:
            for name in dict.fromkeys(node.inputs):
                if name is not None:
                    readers.setdefault(name, []).append(node)
        by_name = {name: tuple(found) for name, found in readers.items()}
        return replace(self, nodes=nodes, makers=makers, specs=specs, readers=by_name)

    def users(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a tensor, in order."""
        return self.readers.get(name, ())

    def maker(self, name: str | None, kind: str) -> Node | None:
        """The node of this kind that makes a tensor, if one does."""
        node = self.makers.get(name) if name is not None else None
        return node if node is not None and node.kind == kind else None


Rule = Callable[[Graph, "Node"], "list[Node] | None"]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Replaces each node for which the rule has an answer by that answer, whose last node makes the same outputs; an
    empty answer leaves them to the answer for another node.

    What only the replaced node used is left behind for `drop_unused`; what is used elsewhere stays, so a rule need not
    ask who else reads a tensor."""
    nodes: list[Node] = []
    for node in graph.nodes:
        answer = rule(graph, node)
        nodes.extend([node] if answer is None else answer)
    return drop_unused(_in_order(graph.with_nodes(nodes)))


def _in_order(graph: Graph) -> Graph:
    """Each node after what it reads: an answer may stand where only the first of the nodes that it replaces stood."""
    ordered: dict[str, Node] = {}  # by first output

    def place(node: Node) -> None:
        if node.outputs[0].name not in ordered:
            for maker in (graph.makers.get(str(name)) for name in node.inputs):
                if maker is not None:
                    place(maker)
            ordered[node.outputs[0].name] = node

    for node in graph.nodes:
        place(node)
    return graph.with_nodes(ordered.values())


def drop_unused(graph: Graph) -> Graph:
    needed, kept = set(graph.wanted), []
    for node in reversed(graph.nodes):
        if any(spec.name in needed for spec in node.outputs):
            needed.update(name for name in node.inputs if name is not None)
            kept.append(node)
    return graph.with_nodes(reversed(kept))


def merge_equal(graph: Graph, numerics: Numerics) -> Graph:
    """Computes once what several nodes compute alike (the same rows of the RoPE tables in every layer), and drops casts
    that this mode makes empty."""
    names: dict[str, str] = {}
    seen: dict[tuple[object, ...], Node] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) if name is not None else None for name in node.inputs)
        node = replace(node, inputs=inputs)
        hidden = all(spec.name not in graph.wanted for spec in node.outputs)
        if hidden and node.kind == "cast" and _is_empty_cast(graph, node, numerics):
            names[node.outputs[0].name] = str(inputs[0])
            continue
        types = tuple((spec.dtype, spec.shape) for spec in node.outputs)
        key = (node.kind, inputs, types, repr(sorted(node.attributes.items())))
        twin = node if updates(node) else seen.setdefault(key, node)
        if twin is not node and hidden:
            names.update({a.name: b.name for a, b in zip(node.outputs, twin.outputs, strict=True)})
            continue
        kept.append(node)
    return graph.with_nodes(kept)


def _find_twins(program: Program) -> dict[str, str]:
    """Scalars that say the same (an epsilon, a softmax scale, once per layer) → the first of them."""
    first: dict[tuple[object, ...], str] = {}
    twins = {}
    for name, spec in program.constant_specs.items():
        if math.prod(spec.shape) == 1 and spec.dtype != "int4":
            value = program.constants[name].to_torch().reshape(-1).tolist()[0]
            twins[name] = first.setdefault((spec.dtype, spec.shape, repr(value)), name)
    return twins


def _is_empty_cast(graph: Graph, node: Node, numerics: Numerics) -> bool:
    source = graph.specs[str(node.inputs[0])]
    return numerics.held(source.dtype) == numerics.held(node.outputs[0].dtype)


def _check_in_place(program: Program) -> None:
    """A cache and its update share memory: another reader of the cache would see the update or not, by chance."""
    users: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in node.inputs:
            if name is not None:
                users.setdefault(name, []).append(node)
    inputs = {spec.name for spec in program.inputs}
    for node in program.nodes:
        for index in updates(node):
            cache = node.inputs[index]
            if cache not in inputs:
                raise UnsupportedLayerError(node.name, f"the cache {cache} is no input of the network")
            if len(users[cache]) > 1:
                raise UnsupportedLayerError(node.name, f"the cache {cache} is read elsewhere too")
