"""Attention over the paged cache: what depends only on the step is split off, so that all layers share it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.interpreter.rules.match import maker_of, part

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph
    from pipeline.network.program import Node


def split_cache_update(graph: Graph, node: Node) -> list[Node] | None:
    """Where the packed rows go is the same for every pool of one shape."""
    if node.kind != "kv_cache_update" or node.attributes["form"] != "packed_nhd":
        return None
    cache, update, starts, lengths = node.inputs
    _, heads, size, _ = graph.specs[str(cache)].shape
    rows = part(node, "cache_rows", (starts, lengths), (-1,), {"heads": heads, "size": size})
    return [rows, replace(node, kind="write_cache_rows", inputs=(cache, update, rows.outputs[0].name))]


def split_attention(graph: Graph, node: Node) -> list[Node] | None:
    """The mask as what is added to the scores is the same in every layer."""
    if node.kind != "attention" or node.attributes["causal"] != "none" or len(node.inputs) < 4:
        return None
    q, k, v, mask = node.inputs
    if mask is None or graph.specs[mask].shape[1] != 1:
        return None
    heads, kv_heads = graph.specs[str(q)].shape[1], graph.specs[str(k)].shape[1]
    if heads < 1 or kv_heads < 1:
        return None
    bias = part(
        node, "attention_bias", (mask,), (-1, 1, -1, -1), {"groups": heads // kv_heads}, dtype=node.outputs[0].dtype
    )
    return [bias, replace(node, kind="attend", inputs=(q, k, v, bias.outputs[0].name))]


def merge_pages(graph: Graph, node: Node) -> list[Node] | None:
    """gather(pool, table) → swap block and head → join the blocks: one copy of rows [block, width] instead of two.

    With one head there is nothing to swap, and the gather alone is that copy."""
    if node.kind != "shuffle" or node.attributes["first_transpose"] != [0, 2, 1, 3, 4]:
        return None
    gather = graph.maker(node.inputs[0], "gather")
    if gather is None or gather.attributes["axis"] != 0 or gather.attributes["mode"] != "default":
        return None
    pool, table = (graph.specs[str(name)] for name in gather.inputs)
    if len(pool.shape) != 4 or len(table.shape) != 2 or pool.name in graph.constants:
        return None
    _, heads, _, width = pool.shape
    joined = node.attributes["second_transpose"] is None and node.attributes["zero_is_placeholder"]
    if not joined or node.attributes["reshape_dims"] not in ([0, 0, -1, width], [0, heads, -1, width]):
        return None
    rows = part(node, "page_rows", (table.name,), (-1,), {"heads": heads})
    return [rows, replace(node, kind="gather_pages", inputs=(pool.name, table.name, rows.outputs[0].name))]


def attend_in_place(graph: Graph, node: Node) -> list[Node] | None:
    """Attention over gathered pages: over the pools themselves."""
    if node.kind != "attend":
        return None
    q, k, v, bias = node.inputs
    keys, values = maker_of(graph, k, "gather_pages"), maker_of(graph, v, "gather_pages")
    if keys is None or values is None or keys.inputs[1] != values.inputs[1]:
        return None
    types = {graph.specs[str(name)].dtype for name in (q, keys.inputs[0], values.inputs[0], bias)}
    if len(types) != 1 or graph.specs[str(keys.inputs[1])].dtype != "int32":
        return None
    inputs = (q, keys.inputs[0], values.inputs[0], *keys.inputs[1:], bias)
    return [replace(node, kind="attend_pages", inputs=inputs)]


def attend_packed(graph: Graph, node: Node) -> list[Node] | None:
    """Packed queries laid out by sequence → attention over the pools → packed rows: at once."""
    rows = (
        maker_of(graph, node.inputs[0], "shuffle", first_transpose=[0, 2, 1, 3]) if node.kind == "take_rows" else None
    )
    attend = rows and graph.maker(rows.inputs[0], "attend_pages")
    if attend is None or rows is None or graph.specs[str(rows.inputs[0])].dtype != node.outputs[0].dtype:
        return None
    by_head = maker_of(graph, attend.inputs[0], "shuffle", first_transpose=[0, 2, 1, 3], reshape_dims=None)
    padded = by_head and graph.maker(by_head.inputs[0], "take_rows")
    _, heads, _, width = graph.specs[str(rows.inputs[0])].shape
    joins = rows.attributes["reshape_dims"] == [-1, heads * width] and rows.attributes["second_transpose"] is None
    if padded is None or by_head is None or by_head.attributes["second_transpose"] is not None or not joins:
        return None
    inputs = (padded.inputs[0], *attend.inputs[1:], *padded.inputs[1:], *node.inputs[1:])
    return [replace(attend, kind="attend_packed", inputs=inputs, outputs=node.outputs)]


def attend_latent(graph: Graph, node: Node) -> list[Node] | None:
    """Packed queries of several heads, folded into rows of one, over one pool of keys whose first values are the values
    → packed rows: at once."""
    content = maker_of(graph, node.inputs[0], "slice", axes=[2], start=[0]) if node.kind == "take_rows" else None
    if content is None or content.attributes["stride"] != [1] or len(content.inputs) != 1:
        return None
    by_head = _reshape(graph, content.inputs[0])
    attend = by_head and graph.maker(by_head.inputs[0], "attend")
    if attend is None or by_head is None or attend.inputs[1] != attend.inputs[2]:
        return None
    folded, pages = _reshape(graph, attend.inputs[0]), _reshape(graph, attend.inputs[1])
    padded = folded and graph.maker(folded.inputs[0], "take_rows")
    gather = pages and maker_of(graph, pages.inputs[0], "gather", axis=0, mode="default")
    if padded is None or folded is None or gather is None or pages is None:
        return None
    q, pool, table = (graph.specs[str(name)] for name in (padded.inputs[0], *gather.inputs))
    if len(q.shape) != 3 or len(pool.shape) != 4 or pool.shape[1] != 1 or table.dtype != "int32":
        return None
    _, heads, width = q.shape
    folds = folded.attributes["reshape_dims"] == pages.attributes["reshape_dims"] == [0, 1, -1, width]
    if not folds or by_head.attributes["reshape_dims"] != [-1, heads, width] or len(table.shape) != 2:
        return None
    if len({q.dtype, pool.dtype, graph.specs[str(attend.inputs[3])].dtype, node.outputs[0].dtype}) != 1:
        return None
    inputs = (q.name, pool.name, table.name, attend.inputs[3], *padded.inputs[1:], *node.inputs[1:])
    attributes = {"heads": heads, "width": content.attributes["size"][0]}
    return [replace(node, kind="attend_latent", inputs=inputs, attributes=attributes)]


def _reshape(graph: Graph, name: str | None) -> Node | None:
    """A shuffle that only reshapes, to dimensions that are known but for those it copies or infers."""
    node = maker_of(graph, name, "shuffle", first_transpose=None, second_transpose=None, zero_is_placeholder=True)
    return node if node is not None and len(node.inputs) == 1 else None


def share_rows(graph: Graph, node: Node) -> list[Node] | None:
    """Rows of a tensor by an index that the step brings: whether they are all rows in order, so that nothing need be
    copied (one token of each sequence), is asked once."""
    if node.kind != "gather" or node.attributes["mode"] != "default" or node.attributes["axis"] != 0:
        return None
    data, index = (graph.specs[str(name)] for name in node.inputs)
    if index.name in graph.makers or index.name in graph.constants or data.name in graph.constants:
        return None
    if index.dtype != "int32" or len(data.shape) > 3:  # pools have four dimensions: their blocks are never in order
        return None
    rows = part(node, "row_index", (index.name,), (-1,), {})
    return [rows, replace(node, kind="take_rows", inputs=(data.name, index.name, rows.outputs[0].name))]
