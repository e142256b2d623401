"""Rotary embedding: the tables' rows of a step, and the chain around a rotation of packed rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import is_node, maker_of, part, through_cast

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node


def split_rotary(graph: Graph, node: Node) -> list[Node] | None:
    """The tables' rows of this step are the same for q, k and every layer."""
    if node.kind != "rotary_embedding" or len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    data, cos, sin, positions = node.inputs
    keys = {"interleaved": node.attributes["interleaved"]}
    rows = part(node, "rotary_rows", (cos, sin, positions), (-1, 1, -1, -1), keys, dtype="float32")
    return [rows, replace(node, kind="rotate", inputs=(data, rows.outputs[0].name))]


def fuse_rotation(graph: Graph, node: Node) -> list[Node] | None:
    """cast to fp32 → [T, heads, 1, d] → rotate → [T, heads, d], where each packed row is a sequence of one position."""
    if node.kind != "shuffle":
        return None
    rotate = maker_of(graph, node.inputs[0], "rotate")
    column = rotate and maker_of(graph, rotate.inputs[0], "shuffle")
    rows = rotate and maker_of(graph, rotate.inputs[1], "rotary_rows")
    if rotate is None or column is None or rows is None:
        return None
    source, target = graph.specs[str(column.inputs[0])], node.outputs[0]
    heads, width = target.shape[1:] if len(target.shape) == 3 else (0, 0)
    if source.shape != (-1, heads, width) or graph.specs[str(rotate.inputs[0])].shape != (-1, heads, 1, width):
        return None
    if not (_only_reshapes(column, [-1, heads, 1, width]) and _only_reshapes(node, [-1, heads, width])):
        return None
    if rotate.outputs[0].dtype != "float32" or source.dtype != "float32":
        return None
    turns = part(rotate, "row_turns", rows.inputs, (-1, 1, -1), dict(rows.attributes), dtype="float32")
    inputs = (through_cast(graph, source.name), turns.outputs[0].name)
    return [turns, replace(node, kind="rotate_rows", inputs=inputs, attributes=rotate.attributes)]


def scale_rotation(graph: Graph, node: Node) -> list[Node] | None:
    """A rotation times one number: the tables of the step times that number. (In fp32: other roundings of its last
    bit.)"""
    if node.kind != "elementwise" or node.attributes["op"] != "prod":
        return None
    rotation = maker_of(graph, node.inputs[0], "rotate_rows")
    factor = node.inputs[1]
    if rotation is None or factor not in graph.constants or graph.specs[str(factor)].shape != (1, 1, 1):
        return None
    dim = rotation.attributes["dim"]
    if dim and dim != rotation.outputs[0].shape[2]:  # what is not rotated would stay as it was
        return None
    turns = maker_of(graph, rotation.inputs[1], "row_turns")
    if turns is None or _is_scaled(turns):
        return None
    scaled = part(node, "row_turns", (*turns.inputs[:3], factor), (-1, 1, -1), turns.attributes, dtype="float32")
    return [scaled, replace(rotation, inputs=(rotation.inputs[0], scaled.outputs[0].name), outputs=node.outputs)]


def _is_scaled(turns: Node) -> bool:
    return len(turns.inputs) > 3


def round_rotation(graph: Graph, node: Node) -> list[Node] | None:
    """A rotation rounded at once."""
    rotation = maker_of(graph, node.inputs[0], "rotate_rows") if node.kind == "cast" else None
    return None if rotation is None else [replace(rotation, outputs=node.outputs)]


def join_rotations(graph: Graph, node: Node) -> list[Node] | None:
    """Neighbouring heads of one tensor, some turned by scaled tables (queries) and some by plain ones (keys): one
    rotation by tables that are laid out head by head, once per step."""
    if node.kind != "rotate_rows":
        return None
    heads = _slice_of_heads(graph, node)
    if heads is None:
        return None
    source, _, _ = heads
    found = {}
    for reader in graph.users(source):
        for user in graph.users(reader.outputs[0].name) if reader.kind == "slice" else ():
            if user.kind == "rotate_rows" and user.outputs[0].dtype == node.outputs[0].dtype:
                part_of = _slice_of_heads(graph, user)
                if part_of is not None and user.attributes == node.attributes:
                    found[part_of[1]] = (user, part_of[2])
    if len(found) != 2:
        return None
    (first, (left, left_count)), (second, (right, right_count)) = sorted(found.items())
    if first != 0 or second != left_count or right_count + second > graph.specs[source].shape[1]:
        return None
    if node is right:
        return []
    counts, tables = [left_count, right_count], (left.inputs[1], right.inputs[1])
    turns = part(
        left,
        "head_turns",
        tables,
        (-1, sum(counts), -1),
        {"counts": counts},
        dtype="float32",
    )
    attributes = {**node.attributes, "counts": counts}
    outputs = (left.outputs[0], right.outputs[0])
    inputs = (source, turns.outputs[0].name)
    return [turns, replace(left, kind="rotate_heads", inputs=inputs, outputs=outputs, attributes=attributes)]


def join_rotated(graph: Graph, node: Node) -> list[Node] | None:
    """What is not rotated and what is, side by side [T, heads, width + dim]: in one pass."""
    if node.kind != "concatenation" or node.attributes["axis"] != 2 or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    rotation = graph.maker(right, "rotate_rows")
    if rotation is None or len(graph.specs[str(left)].shape) != 3:
        return None
    if rotation.attributes["dim"] not in (0, rotation.outputs[0].shape[2]):
        return None
    inputs = (through_cast(graph, left), *rotation.inputs)
    return [replace(node, kind="join_rotated", inputs=inputs, attributes=rotation.attributes)]


def scale_joined(graph: Graph, node: Node) -> list[Node] | None:
    """Both times one number: of the rotation's part the tables of the step."""
    if not is_node(node, "elementwise", op="prod"):
        return None
    joined, factor = graph.maker(node.inputs[0], "join_rotated"), node.inputs[1]
    if joined is None or factor not in graph.constants or graph.specs[str(factor)].shape != (1, 1, 1):
        return None
    turns = graph.maker(joined.inputs[2], "row_turns")
    if turns is None or _is_scaled(turns) or len(joined.inputs) != 3 or graph.specs[str(factor)].dtype != "float32":
        return None
    scaled = part(node, "row_turns", (*turns.inputs[:3], factor), (-1, 1, -1), turns.attributes, dtype="float32")
    inputs = (*joined.inputs[:2], scaled.outputs[0].name, factor)
    return [scaled, replace(joined, inputs=inputs, outputs=node.outputs)]


def round_joined(graph: Graph, node: Node) -> list[Node] | None:
    """Both rounded at once."""
    joined = graph.maker(node.inputs[0], "join_rotated") if node.kind == "cast" else None
    return None if joined is None else [replace(joined, outputs=node.outputs)]


def write_joined(graph: Graph, node: Node) -> list[Node] | None:
    """Both written to the cache at once."""
    joined = graph.maker(node.inputs[1], "join_rotated") if node.kind == "write_cache_rows" else None
    if joined is None or len(joined.inputs) != 3:
        return None
    inputs = (*joined.inputs, node.inputs[2], node.inputs[0])
    return [replace(node, kind="write_joined", inputs=inputs, attributes=joined.attributes)]


def write_rotated(graph: Graph, node: Node) -> list[Node] | None:
    """Keys rotated beside their queries and written to the cache, and values, the heads after them: all at once."""
    rotations = [node]
    if node.kind == "write_cache_rows":  # of keys, or of values
        made = graph.makers.get(str(node.inputs[1]))
        source = made.inputs[0] if made is not None and made.kind == "slice" else None
        rotations = [made] if made is not None else []
        rotations += graph.users(source) if source is not None else ()
    for rotation in rotations:
        writes = _cache_writes(graph, rotation) if rotation.kind == "rotate_heads" else None
        if writes is not None and node in writes:
            return []
        if writes is not None and node is rotation:
            keys, values = writes
            source, turns = rotation.inputs
            _, heads, width = graph.specs[str(source)].shape
            by_head = graph.maker(source, "shuffle")
            if by_head is not None and _only_reshapes(by_head, [-1, heads, width]):
                source = by_head.inputs[0]  # the same memory
            inputs = (source, turns, keys.inputs[2], keys.inputs[0], values.inputs[0])
            outputs = (rotation.outputs[0], keys.outputs[0], values.outputs[0])
            attributes = {**rotation.attributes, "shape": [heads, width]}
            return [replace(rotation, kind="rotate_into_cache", inputs=inputs, outputs=outputs, attributes=attributes)]
    return None


def _cache_writes(graph: Graph, rotation: Node) -> tuple[Node, Node] | None:
    """The writes of a rotation's keys and of the values behind them, where both go to the same rows."""
    (queries, count), keys = rotation.attributes["counts"], rotation.outputs[1].name
    writes = [user for user in graph.users(keys) if user.kind == "write_cache_rows"]
    if keys in graph.wanted or len(graph.users(keys)) != 1 or len(writes) != 1:
        return None
    for piece in graph.users(str(rotation.inputs[0])):
        if piece.kind == "slice" and _heads_of(graph, piece) == (rotation.inputs[0], queries + count, count):
            for user in graph.users(piece.outputs[0].name):
                if user.kind == "write_cache_rows" and user.inputs[2] == writes[0].inputs[2]:
                    return writes[0], user
    return None


def _slice_of_heads(graph: Graph, rotation: Node) -> tuple[str, int, int] | None:
    """Of what heads a rotation is, where its input is a slice of some."""
    piece = graph.maker(rotation.inputs[0], "slice")
    return None if piece is None else _heads_of(graph, piece)


def _heads_of(graph: Graph, piece: Node) -> tuple[str, int, int] | None:
    """A slice that takes heads first … first + count of a tensor [T, heads, D]: its name, first and count."""
    if not is_node(piece, "slice", axes=[1], stride=[1]) or len(piece.inputs) != 1:
        return None
    return str(piece.inputs[0]), int(piece.attributes["start"][0]), int(piece.attributes["size"][0])


def _only_reshapes(node: Node, dims: list[int]) -> bool:
    names = ("first_transpose", "second_transpose", "reshape_dims")
    return len(node.inputs) == 1 and [node.attributes[name] for name in names] == [None, None, dims]
