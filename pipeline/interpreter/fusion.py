"""Rewrites that make a step cheaper and keep its meaning: recognised by kinds and connections, never by names.

Each rule maps one node to nodes whose last makes the same outputs. Two ideas do most of the work: what depends only on
the step (rows of the RoPE tables, places in the pool, the mask as a bias) becomes a node of its own, which
`graph.merge_equal` then keeps once for all layers; and a product with a constant becomes a `linear`, whose weight is
laid out once for the CPU's matrix kernel. The kernels are in operations/fused.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.interpreter.graph import Graph, rewrite
from pipeline.network.program import Node, TensorSpec

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Rule
    from pipeline.interpreter.numerics import Numerics


def fuse(graph: Graph, numerics: Numerics) -> Graph:
    for rule in (*FAST_RULES, *RULES) if numerics.mode == "fast" else RULES:
        graph = rewrite(graph, rule)
    return graph


def split_cache_update(graph: Graph, node: Node) -> list[Node] | None:
    """Where the packed rows go is the same for every pool of one shape."""
    if node.kind != "kv_cache_update" or node.attributes["form"] != "packed_nhd":
        return None
    cache, update, starts, lengths = node.inputs
    _, heads, size, _ = graph.specs[str(cache)].shape
    rows = _part(node, "cache_rows", (starts, lengths), (-1,), {"heads": heads, "size": size})
    return [rows, replace(node, kind="write_cache_rows", inputs=(cache, update, rows.outputs[0].name))]


def split_rotary(graph: Graph, node: Node) -> list[Node] | None:
    """The tables' rows of this step are the same for q, k and every layer."""
    if node.kind != "rotary_embedding" or len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    data, cos, sin, positions = node.inputs
    keys = {"interleaved": node.attributes["interleaved"]}
    rows = _part(node, "rotary_rows", (cos, sin, positions), (-1, 1, -1, -1), keys, dtype="float32")
    return [rows, replace(node, kind="rotate", inputs=(data, rows.outputs[0].name))]


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
    bias = _part(
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
    rows = _part(node, "page_rows", (table.name,), (-1,), {"heads": heads})
    return [rows, replace(node, kind="gather_pages", inputs=(pool.name, table.name, rows.outputs[0].name))]


def fuse_norm(graph: Graph, node: Node) -> list[Node] | None:
    """x / sqrt(mean(x²) + eps), in fp32 with the casts around it, times a weight (RMSNorm, arXiv 1910.07467)."""
    if not _is(node, "elementwise", op="prod"):
        return None
    normal, weight = node.inputs
    ratio = _maker_of(graph, _through_cast(graph, normal), "elementwise", op="div")
    if ratio is None:
        return None
    wide, root = ratio.inputs
    square_root = _maker_of(graph, root, "unary", op="sqrt")
    variance = square_root and _maker_of(graph, square_root.inputs[0], "elementwise", op="sum")
    if variance is None:
        return None
    mean, eps = variance.inputs
    rank = len(graph.specs[str(wide)].shape)
    average = _maker_of(graph, mean, "reduce", op="avg", axes=[rank - 1], keep_dims=True)
    square = average and _maker_of(graph, average.inputs[0], "elementwise", op="prod")
    if square is None or square.inputs != (wide, wide) or graph.specs[str(wide)].dtype != "float32":
        return None
    source = _through_cast(graph, wide)
    attributes = {"normal": graph.specs[str(normal)].dtype}
    return [replace(node, kind="rms_norm", inputs=(source, weight, eps), attributes=attributes)]


def prepare_linear(graph: Graph, node: Node) -> list[Node] | None:
    """A product whose second factor depends on constants only."""
    if node.kind != "matrix_multiply" or node.attributes["op0"] != "none":
        return None
    return [replace(node, kind="linear")] if _is_constant(graph, str(node.inputs[1])) else None


def prepare_int4_linear(graph: Graph, node: Node) -> list[Node] | None:
    """x @ dequantize(INT4 [in, out], scales [in / group, out]): the packed weight goes to the kernel beside the
    dequantized one, which serves where there are many rows."""
    if not _is(node, "matrix_multiply", op0="none", op1="none") or len(graph.specs[str(node.inputs[0])].shape) != 2:
        return None
    dequantize = graph.maker(node.inputs[1], "dequantize")
    if dequantize is None or not all(name in graph.constants for name in dequantize.inputs):
        return None
    packed, scales = (graph.specs[str(name)] for name in dequantize.inputs)
    if packed.dtype != "int4" or len(scales.shape) != 2 or scales.shape[1] != packed.shape[1]:
        return None
    return [replace(node, kind="linear_int4", inputs=(*node.inputs, packed.name, scales.name))]


FAST_RULES: tuple[Rule, ...] = (prepare_int4_linear,)
RULES: tuple[Rule, ...] = (
    split_cache_update,
    split_rotary,
    split_attention,
    merge_pages,
    fuse_norm,
    prepare_linear,
)


def _part(
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


def _is(node: Node, kind: str, **attributes: object) -> bool:
    return node.kind == kind and all(node.attributes[name] == value for name, value in attributes.items())


def _maker_of(graph: Graph, name: str | None, kind: str, **attributes: object) -> Node | None:
    node = graph.maker(name, kind)
    return node if node is not None and _is(node, kind, **attributes) else None


def _through_cast(graph: Graph, name: str | None) -> str | None:
    """The tensor before a cast, where one made this tensor."""
    cast = graph.maker(name, "cast")
    return name if cast is None else cast.inputs[0]


def _is_constant(graph: Graph, name: str) -> bool:
    if name in graph.constants:
        return True
    node = graph.makers.get(name)
    return node is not None and all(source is not None and _is_constant(graph, source) for source in node.inputs)
