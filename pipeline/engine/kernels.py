"""What kernels TensorRT-RTX 1.7 makes of a decoder, as far as they need memory, from the architecture alone.

Read off compiled engines, and held against them in tests. A change of pipeline/network that moves a workspace by more
than a tenth shows there.

Sizes: T rows, B sequences, Q rows of the longest, K cache rows of the longest, N rows of logits (all of the profile's
largest); h, kv, d heads, KV heads, head size; R, P, D = R + P widths of the latent; e bytes of the model's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.checkpoint.architecture import Architecture, Experts, LatentAttention
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.limits import Profile
from pipeline.engine.workspace import Buffer, Schedule, Workspace, place

# The widest head for which there is a fused attention kernel; a wider latent becomes GEMM, softmax, GEMM.
WIDEST_FUSED_HEAD = 256
# A narrow latent is fused too, but only where this many scores (B x Q x h x K) make it worth its transposed copy.
FUSED_LATENT_SCORES = 1 << 24
# Kernels that do not need each other run on streams of their own where they are work enough: experts of this many
# multiply-adds beside the router, a gather of this many elements beside the queries' GEMM (of any size, once a layer
# before it has used a second stream).
FORKED_EXPERTS = 1 << 23
FORKED_GATHER = 1 << 24
_FLOAT32 = _INT32 = 4
# Layers of a kind that are worth listing: a third one fits into the regions of the two before it.
_LAYERS_THAT_COUNT = 2


def plan_workspace(
    architecture: Architecture, profile: Profile, *, dtype: str, block_size: int, moe: str, exchanged: int = 1
) -> Workspace:
    """The workspace that an engine will state for this profile, and what it is made of. exchanged: how many GPUs send
    their rows to the routed experts here, each at worst all of them."""
    sizes = {**profile.maximum, "K": profile.maximum["MB"] * block_size}
    step = _Step(a=architecture, n=sizes, e=MODEL_DTYPE_BYTES[dtype], moe=moe, exchanged=exchanged)
    layers = range(architecture.num_layers)
    kinds = [[layer for layer in layers if architecture.is_routed(layer) is routed] for routed in (False, True)]
    _write_decoder(step, sorted(layer for kind in kinds for layer in kind[:_LAYERS_THAT_COUNT]))
    return place(step.plan.buffers)


@dataclass(slots=True)
class _Step:
    a: Architecture
    n: dict[str, int]
    e: int
    moe: str
    exchanged: int = 1
    plan: Schedule = field(default_factory=Schedule)
    # Made by the first layer, read by all: the mask, RoPE's rows of the tables.
    shared: tuple[Buffer, ...] = ()
    has_streams: bool = False  # an earlier layer has used a second stream

    @property
    def hidden(self) -> int:
        return self.n["T"] * self.a.hidden_size * self.e

    @property
    def is_generation(self) -> bool:
        return self.n["Q"] == 1


def _write_decoder(s: _Step, layers: list[int]) -> None:
    # Which rows go to which block: a few integers per block and per row, read by every layer's cache update.
    blocks = {f"block_rows_{i}": s.n["NB"] * _INT32 for i in range(2)}
    rows = {f"row_blocks_{i}": s.n["T"] * _INT32 for i in range(4)}
    indices = s.plan.kernel(**blocks, **rows)
    state = s.plan.kernel(residual=s.hidden, normal=s.hidden)
    for layer in layers:
        state = (_latent_attention if s.a.latent else _grouped_attention)(s, *state)
        mlp = _MLPS[s.moe] if s.a.is_routed(layer) else _dense_mlp
        state = mlp(s, *state)
    (wanted,) = s.plan.kernel(*state, *indices, wanted=s.n["N"] * s.a.hidden_size * s.e)
    s.plan.gemm(wanted)


def _add_norm(s: _Step, *reads: Buffer) -> tuple[Buffer, ...]:
    return s.plan.kernel(*reads, residual=s.hidden, normal=s.hidden)


def _make_shared(s: _Step, *, mask_rows: int, rotary: int) -> dict[str, int]:
    """What the first layer's kernels write beside their own: the mask as numbers of the model's type, but as bool where
    the generation phase's kernel takes it."""
    if s.shared:
        return {}
    narrow = s.is_generation and mask_rows == 1
    return {
        "mask": s.n["B"] * s.n["Q"] * mask_rows * s.n["K"] * (1 if narrow else s.e),
        "cos": s.n["T"] * rotary // 2 * _FLOAT32,
        "sin": s.n["T"] * rotary // 2 * _FLOAT32,
    }


def _grouped_attention(s: _Step, residual: Buffer, normal: Buffer) -> tuple[Buffer, ...]:
    h, kv, d, n, e = s.a.num_heads, s.a.num_kv_heads, s.a.head_dim, s.n, s.e
    (qkv,) = s.plan.gemm(normal, qkv=n["T"] * (h + 2 * kv) * d * e)
    query, *made = s.plan.kernel(qkv, query=n["B"] * n["Q"] * h * d * e, **_make_shared(s, mask_rows=1, rotary=d))
    s.shared = s.shared or tuple(made)
    pages = n["B"] * n["K"] * kv * d * e
    (keys,) = s.plan.kernel(gathered_keys=pages)
    (values,) = s.plan.kernel(gathered_values=pages)
    attention = n["B"] * n["Q"] * h * d * e
    if s.is_generation or (d <= WIDEST_FUSED_HEAD and e < _FLOAT32):
        (out,) = s.plan.kernel(query, keys, values, *s.shared, attention=attention)
    else:
        scores = n["B"] * n["Q"] * h * n["K"] * e
        (raw,) = s.plan.gemm(query, keys, scores=scores)
        (soft,) = s.plan.kernel(raw, *s.shared, probabilities=scores)
        (out,) = s.plan.gemm(soft, values, attention=attention)
    (packed,) = s.plan.kernel(out, packed=n["T"] * h * d * e)
    (dense,) = s.plan.gemm(packed, dense=s.hidden)
    return _add_norm(s, residual, dense)


def _latent_attention(s: _Step, residual: Buffer, normal: Buffer) -> tuple[Buffer, ...]:
    latent = _latent(s)
    h, t, e = s.a.num_heads, s.n["T"], s.e
    scores = s.n["B"] * s.n["Q"] * h * s.n["K"]
    fused = latent.latent_dim <= WIDEST_FUSED_HEAD and scores >= FUSED_LATENT_SCORES and e < _FLOAT32
    content, rotary = _latent_projections(s, latent, normal)
    out = (_fused_latent if fused else _decomposed_latent)(s, latent, content, rotary)
    (packed,) = s.plan.kernel(out, packed=t * h * latent.kv_lora_rank * e)
    (values,) = s.plan.gemm(packed, values=t * h * latent.v_head_dim * e)
    (merged,) = s.plan.kernel(values, merged=t * h * latent.v_head_dim * e)
    (dense,) = s.plan.gemm(merged, dense=s.hidden)
    return _add_norm(s, residual, dense)


def _latent_projections(s: _Step, latent: LatentAttention, normal: Buffer) -> tuple[Buffer, Buffer]:
    """The query's content part and its rotary part, in float32."""
    h, t, e, rank = s.a.num_heads, s.n["T"], s.e, latent.q_lora_rank
    query = h * latent.qk_head_dim
    if rank is None:  # one GEMM makes both
        (projected,) = s.plan.gemm(normal, query_and_latent=t * (query + latent.latent_dim) * e)
    else:
        (compressed,) = s.plan.gemm(normal, compressed=t * (rank + latent.latent_dim) * e)
        (normal_rank,) = s.plan.kernel(compressed, compressed_normal=t * rank * e)
        (projected,) = s.plan.gemm(normal_rank, query=t * query * e)
    (wide,) = s.plan.kernel(projected, latent_float32=t * latent.kv_lora_rank * _FLOAT32)
    rotary = t * h * latent.qk_rope_head_dim * _FLOAT32
    content, row = s.plan.kernel(
        projected, wide, content=t * h * latent.qk_nope_head_dim * e, query_rotary_float32=rotary
    )
    return content, row


def _fused_latent(s: _Step, latent: LatentAttention, content: Buffer, rotary: Buffer) -> Buffer:
    """One attention kernel, which wants the gathered latent and its transpose."""
    h, width = s.a.num_heads, latent.latent_dim
    rows, pages = s.n["B"] * s.n["Q"] * h * width * s.e, s.n["B"] * s.n["K"] * width * s.e
    (absorbed,) = s.plan.gemm(content, absorbed=s.n["T"] * h * latent.kv_lora_rank * s.e)
    shared = _make_shared(s, mask_rows=h, rotary=latent.qk_rope_head_dim)
    query, *made = s.plan.kernel(absorbed, rotary, query=rows, **shared)
    s.shared = s.shared or tuple(made)
    both = s.plan.kernel(gathered_latent=pages, gathered_latent_transposed=pages)
    (out,) = s.plan.kernel(query, *both, *s.shared, attention=rows)
    return out


def _decomposed_latent(s: _Step, latent: LatentAttention, content: Buffer, rotary: Buffer) -> Buffer:
    """Two GEMMs around a softmax. K is padded for them by copying, since a dynamic size may be any number."""
    h, r, width, t, e = s.a.num_heads, latent.kv_lora_rank, latent.latent_dim, s.n["T"], s.e
    pages, rows = s.n["B"] * s.n["K"] * width * e, s.n["B"] * s.n["Q"] * h
    if s.has_streams or pages >= FORKED_GATHER * e:
        s.plan.fork()
    gathered, values = s.plan.kernel(gathered_latent=pages, gathered_latent_padded=pages)
    (turned,) = s.plan.kernel(gathered, gathered_latent_transposed=pages)
    (keys,) = s.plan.kernel(turned, gathered_latent_transposed_padded=pages)
    s.plan.next_stream()
    (absorbed,) = s.plan.gemm(content, absorbed=t * h * r * e)
    s.plan.join()
    (query,) = s.plan.kernel(absorbed, rotary, query=rows * width * e)
    (raw,) = s.plan.gemm(query, keys, scores=rows * s.n["K"] * e)
    shared = _make_shared(s, mask_rows=h, rotary=latent.qk_rope_head_dim)
    soft, *made = s.plan.kernel(raw, *s.shared, probabilities=rows * s.n["K"] * e, **shared)
    s.shared = s.shared or tuple(made)
    (padded,) = s.plan.kernel(soft, probabilities_padded=rows * s.n["K"] * e)
    (out,) = s.plan.gemm(padded, values, attention=rows * width * e)
    return out


def _dense_mlp(s: _Step, residual: Buffer, normal: Buffer) -> tuple[Buffer, ...]:
    return _add_norm(s, residual, _gated_mlp(s, normal, s.a.intermediate_size))


def _gated_mlp(s: _Step, normal: Buffer, width: int) -> Buffer:
    t = s.n["T"]
    (both,) = s.plan.gemm(normal, gate_and_up=t * 2 * width * s.e)
    (gated,) = s.plan.kernel(both, gated=t * width * s.e)
    (down,) = s.plan.gemm(gated, down=s.hidden)
    return down


def _routed_dense(s: _Step, residual: Buffer, normal: Buffer) -> tuple[Buffer, ...]:
    """Every expert on every row, E x T of them; the router beside them on a stream of its own where that is work."""
    experts = _experts(s)
    t, width, count = s.n["T"] * s.exchanged, experts.intermediate_size, experts.num_routed
    wide, narrow = t * s.a.hidden_size * _FLOAT32, t * s.a.hidden_size * s.e
    router_input, experts_input = s.plan.kernel(normal, router_input_float32=wide, experts_input=narrow)
    if count * t * s.a.hidden_size * 2 * width >= FORKED_EXPERTS:
        s.plan.fork()
        s.has_streams = True
    (one_hot,) = s.plan.gemm(router_input, one_hot=t * experts.top_k * count * _FLOAT32)
    s.plan.next_stream()
    (both,) = s.plan.gemm(experts_input, experts_gate_and_up=count * t * 2 * width * s.e)
    (gated,) = s.plan.kernel(both, experts_gated=count * t * width * s.e)
    (down,) = s.plan.gemm(gated, experts_down=count * narrow)
    s.plan.join()
    (total,) = s.plan.kernel(down, one_hot, experts_sum_float32=wide)
    shared = (_gated_mlp(s, normal, width * experts.num_shared),) if experts.num_shared else ()
    return _add_norm(s, residual, total, *shared)


def _routed_gather(s: _Step, residual: Buffer, normal: Buffer) -> tuple[Buffer, ...]:
    """Every row's own experts, their weights unpacked and copied: k x T matrices of each linear, on three streams."""
    experts = _experts(s)
    pairs, width, e = s.n["T"] * s.exchanged * experts.top_k, experts.intermediate_size, s.e
    router_input, rows = s.plan.kernel(
        normal, router_input_float32=s.hidden // e * _FLOAT32, experts_input=experts.top_k * s.hidden
    )
    (chosen,) = s.plan.gemm(router_input, chosen=pairs * _INT32)
    matrix = pairs * s.a.hidden_size * width * e
    s.plan.fork()
    (weights,) = s.plan.kernel(chosen, gathered_fc=matrix)
    (gate,) = s.plan.gemm(rows, weights, experts_gate=pairs * width * e)
    s.plan.next_stream()
    (weights,) = s.plan.kernel(chosen, gathered_gate=matrix)
    (up,) = s.plan.gemm(rows, weights, experts_up=pairs * width * e)
    s.plan.next_stream()
    (weights,) = s.plan.kernel(chosen, gathered_proj=matrix)
    shared = (_gated_mlp(s, normal, width * experts.num_shared),) if experts.num_shared else ()
    s.plan.join()
    (gated,) = s.plan.kernel(gate, up, experts_gated=pairs * width * e)
    (down,) = s.plan.gemm(gated, weights, experts_down=experts.top_k * s.hidden)
    return _add_norm(s, residual, down, *shared)


def _latent(s: _Step) -> LatentAttention:
    if s.a.latent is None:
        raise TypeError(f"{s.a.name} has no latent attention")
    return s.a.latent


def _experts(s: _Step) -> Experts:
    if s.a.experts is None:
        raise TypeError(f"{s.a.name} has no routed experts")
    return s.a.experts


_MLPS: dict[str, Callable[[_Step, Buffer, Buffer], tuple[Buffer, ...]]] = {
    "dense": _routed_dense,
    "gather": _routed_gather,
}
