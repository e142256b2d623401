"""Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434 §2.1.2).

The cache holds one row per token, the compressed KV beside the rotary key, and serves as key and value alike:
    q·k = q_nope·(W_k c) + q_rope·k_rope = [W_kᵀ q_nope | q_rope] · [c | k_rope],   out = W_v (softmax(·) c)
so the two halves of kv_b_proj move to the query's side and to the output's. The heads are folded into rows of attention
against the one latent head: TensorRT would otherwise copy the latent for every head.

Sizes: h heads of this rank, N and P the widths of a query without and with RoPE, R the compressed KV's, V the value's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.errors import CompatibilityError
from pipeline.network import cache, inputs
from pipeline.network.attention import rotate
from pipeline.network.context import Context
from pipeline.network.derived import Derived
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import checkpoint_name, linear
from pipeline.network.lowering import ATTENTION, ROPE
from pipeline.network.norm import rms_norm
from pipeline.network.rope import softmax_scale
from pipeline.network.weights import lower

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import LatentAttention

LATENT_NORM_EPS = 1e-6  # transformers and DeepSeek's own code leave q_a and kv_a norms at their default


def latent_attention(g: Graph, context: Context, layer: int, x: Tensor) -> Tensor:
    """x [T, H] → [T, H]."""
    a, latent = context.architecture, context.architecture.latent
    if latent is None:
        raise CompatibilityError(f"{a.name} has no latent attention", hint="config.json lacks kv_lora_rank")
    h, v = context.sizes.heads, latent.v_head_dim
    key_weight, value_weight = _split_kv_b(g, context, latent)
    scales = cache.scales(g, context, layer, (2,))
    query, pool = _rotate_and_append(g, context, latent, layer, x, key_weight, scales)
    packed = _attend(g, context, latent, layer, query, pool, scales)
    at = g.at("value")
    by_head = at.matmul("by_head", at.reshape("content_by_head", packed, first=(1, 0, 2)), value_weight, transpose=True)
    merged = at.reshape("merged", by_head, (-1, h * v), first=(1, 0, 2))
    ranks = context.spec.rank.tensor_group
    return linear(g, context.weights, "dense", merged, a.hidden_size, h * v, bias=a.attention_bias, ranks=ranks)


def _rotate_and_append(
    g: Graph,
    context: Context,
    latent: LatentAttention,
    layer: int,
    x: Tensor,
    key_weight: Tensor,
    scales: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """x [T, H] → absorbed queries [T, h, R+P], rotated and scaled in float32, in the model's type; and the pool with
    what it keeps of each token, the normalized compressed KV and the rotated key."""
    a = context.architecture
    h, n, p, r = context.sizes.heads, latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.kv_lora_rank
    (port,) = inputs.layer_pools(a, context.spec, layer)
    compressed = linear(g, context.weights, "kv_a_proj_with_mqa", x, r + p, a.hidden_size, bias=a.attention_bias)
    content = g.slice("latent.content", compressed, 1, 0, r)
    content = rms_norm(g, context.weights, "kv_a_layernorm", content, r, LATENT_NORM_EPS)
    q = _project_queries(g, context, latent, x)
    at = g.at("query")
    heads = at.reshape("heads", q, (-1, h, n + p))
    by_head = at.reshape("content_by_head", at.slice("content", heads, 2, 0, n), first=(1, 0, 2))
    absorbed = at.matmul("absorbed_by_head", by_head, key_weight)
    if ROPE in context.plugins:
        data = (q, absorbed, content, compressed, *context.tables)
        query, pool = cache.plugin(g, context, ROPE, data, (port,), scales)
        return query, pool
    turned = rotate(at, context, at.slice("rotary_part", heads, 2, n, p))
    absorbed = at.reshape("absorbed", absorbed, first=(1, 0, 2))
    both = at.concatenate("both", [at.cast("absorbed_float32", absorbed, "float32"), turned], 2)
    scaled = at.product("scaled", both, at.number("scale", [[[softmax_scale(a)]]], "float32"))
    at = g.at("latent")
    key = at.reshape("key_heads", at.slice("key", compressed, 1, r, p), (-1, 1, p))
    turned = at.cast("key_rotated", rotate(at.at("key"), context, key), g.dtype)
    row = at.concatenate("row", [at.reshape("content_heads", content, (-1, 1, r)), turned], 2)
    return g.cast("query", scaled, g.dtype), cache.append(g, context, port, row)


def _project_queries(g: Graph, context: Context, latent: LatentAttention, x: Tensor) -> Tensor:
    """[T, h * (N+P)]."""
    a, weights, rank = context.architecture, context.weights, latent.q_lora_rank
    width = context.sizes.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if rank is None:
        return linear(g, weights, "q_proj", x, width, a.hidden_size, bias=False)
    q = linear(g, weights, "q_a_proj", x, rank, a.hidden_size, bias=a.attention_bias)
    q = rms_norm(g, weights, "q_a_layernorm", q, rank, LATENT_NORM_EPS)
    return linear(g, weights, "q_b_proj", q, width, rank, bias=False)


def _attend(
    g: Graph,
    context: Context,
    latent: LatentAttention,
    layer: int,
    query: Tensor,
    pool: Tensor,
    scales: Sequence[Tensor],
) -> Tensor:
    """query [T, h, R+P] over the pool → [T, h, R]."""
    if ATTENTION in context.plugins:
        (sums,) = g.plugin(ATTENTION, context.plugins[ATTENTION], [query, pool, *cache.steps(context), *scales])
        return sums
    a, width = context.architecture, latent.latent_dim
    (port,) = inputs.layer_pools(a, context.spec, layer)
    latents = cache.pages(g, context, port, pool)
    padded = g.gather("query.padded", query, context.inputs[inputs.PAD_INDEX.name])
    folded = g.reshape("query.folded", padded, (0, 1, -1, width))  # [B, 1, Q*h, R+P]
    scores = g.attention("attention", folded, latents, latents, context.mask, decomposable=True)
    at = g.at("value")
    rows = at.reshape("rows", scores, (-1, context.sizes.heads, width))
    content = at.slice("content", rows, 2, 0, latent.kv_lora_rank)
    return at.gather("packed", content, context.inputs[inputs.UNPAD_INDEX.name])


def _split_kv_b(g: Graph, context: Context, latent: LatentAttention) -> tuple[Tensor, Tensor]:
    """kv_b_proj [h*(N+V), R] as its key half [h, N, R] and its value half [h, V, R]: a copy, small beside the layer, or
    slices of what FP8 blocks give."""
    h, n, v, r = context.sizes.heads, latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank
    base = checkpoint_name(g, "kv_b_proj")
    stored = context.weights.find_format(base)
    if stored not in (None, "fp8_blocks"):
        raise CompatibilityError(
            f"{base} is quantized to {stored}; absorbed attention splits it by head and needs 16 bits",
            hint="leave attention_latent out of stages.quantize.include",
        )
    whole = (h * (n + v), r)
    if stored:
        at = g.at("kv_b_proj")
        heads = at.reshape("heads", lower(at, context.weights, base, *whole).weight, (h, n + v, r))
        return at.slice("key_weight", heads, 1, 0, n), at.slice("value_weight", heads, 1, n, v)
    dtype = context.weights.read(f"{base}.weight", whole).dtype

    def half(name: str, start: int, size: int) -> Tensor:
        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            by_head = context.weights.read(f"{base}.weight", whole).data.reshape(h, n + v, -1)  # -1 counts bytes
            yield np.ascontiguousarray(by_head[:, start : start + size]).reshape(-1)

        return g.constant(f"kv_b_proj.{name}_weight", Derived(dtype, (h, size, r), pieces))

    return half("key", 0, n), half("value", n, v)
