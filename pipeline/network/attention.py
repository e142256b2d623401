"""Grouped-query attention over the paged cache (Llama)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.network import cache, inputs
from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import linear
from pipeline.network.lowering import ATTENTION, ROPE
from pipeline.network.rope import softmax_scale


def grouped_query_attention(g: Graph, context: Context, layer: int, x: Tensor) -> Tensor:
    """x [T, H] → [T, H]. RoPE and the softmax scale in float32; only attention itself is padded, to [B, heads, Q, D].

    Sizes: h query heads, kv key and value heads (of this rank), D their width.
    """
    a = context.architecture
    h, kv, d = context.sizes.heads, context.sizes.kv_heads, a.head_dim
    qkv = linear(g, context.weights, "qkv", x, (h + 2 * kv) * d, a.hidden_size, bias=a.qkv_bias)
    scales = cache.scales(g, context, layer, (2, kv))
    query, k_pool, v_pool = rotate_and_append(g, context, layer, qkv, scales)
    packed = attend(g, context, layer, query, (k_pool, v_pool), scales)
    ranks = context.spec.rank.tensor_group
    return linear(g, context.weights, "dense", packed, a.hidden_size, h * d, bias=a.attention_bias, ranks=ranks)


def rotate_and_append(
    g: Graph, context: Context, layer: int, qkv: Tensor, scales: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (h + 2 kv) D] → the queries [T, h, D], rotated and scaled, and the pools with the rotated keys and the
    values in them."""
    a = context.architecture
    h, kv, d = context.sizes.heads, context.sizes.kv_heads, a.head_dim
    k_pool, v_pool = inputs.layer_pools(a, context.spec, layer)
    if ROPE in context.plugins:
        query, *pools = cache.plugin(g, context, ROPE, (qkv, *context.tables), (k_pool, v_pool), scales)
        return query, pools[0], pools[1]
    heads = g.reshape("heads", qkv, (-1, h + 2 * kv, d))
    q = rotate(g.at("query"), context, g.slice("query.heads", heads, 1, 0, h))
    q = g.product("query.scaled", q, g.number("query.scale", [[[softmax_scale(a)]]], "float32"))
    k = rotate(g.at("key"), context, g.slice("key.heads", heads, 1, h, kv))
    v = g.slice("value", heads, 1, h + kv, kv)
    keys = cache.append(g, context, k_pool, g.cast("key", k, g.dtype))
    return g.cast("query", q, g.dtype), keys, cache.append(g, context, v_pool, v)


def attend(
    g: Graph, context: Context, layer: int, query: Tensor, pools: tuple[Tensor, Tensor], scales: Sequence[Tensor]
) -> Tensor:
    """query [T, h, D] over the pools → [T, h * D]."""
    a, width = context.architecture, context.sizes.heads * context.architecture.head_dim
    if ATTENTION in context.plugins:
        (sums,) = g.plugin(ATTENTION, context.plugins[ATTENTION], [query, *pools, *cache.steps(context), *scales])
        return g.reshape("rows", sums, (-1, width))
    ports = inputs.layer_pools(a, context.spec, layer)
    keys, values = (cache.pages(g, context, *pair) for pair in zip(ports, pools, strict=True))
    padded = g.gather("query.padded", query, context.inputs[inputs.PAD_INDEX.name])
    queries = g.reshape("query.by_head", padded, first=(0, 2, 1, 3))
    # Decomposable leaves the builder a way where no fused kernel has this head size or type.
    scores = g.attention("attention", queries, keys, values, context.mask, decomposable=True)
    rows = g.reshape("rows", scores, (-1, width), first=(0, 2, 1, 3))
    return g.gather("packed", rows, context.inputs[inputs.UNPAD_INDEX.name])


def rotate(g: Graph, context: Context, x: Tensor) -> Tensor:
    """x [T, heads, D] rotated, in float32. Each row is a sequence of one position, so nothing is transposed."""
    _, heads, width = x.shape
    rows = g.reshape("column", g.cast("float32", x, "float32"), (-1, heads, 1, width))
    interleaved = context.architecture.rope.interleaved
    turned = g.rotate("rotary", rows, context.tables, context.positions, interleaved=interleaved)
    return g.reshape("rotated", turned, (-1, heads, width))
