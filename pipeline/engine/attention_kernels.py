"""The kernels of a decoder's attention, grouped and latent; sizes are spelled as in kernels.py."""

from __future__ import annotations

from pipeline.checkpoint.architecture import LatentAttention
from pipeline.engine.step import FLOAT32, FORKED_GATHER, Buffers, Step, add_norm
from pipeline.engine.workspace import Buffer

INPUT, OUTPUT = "attention_input", "attention_output"  # roles
# The widest head for which there is a fused attention kernel; a wider latent becomes GEMM, softmax, GEMM.
WIDEST_FUSED_HEAD = 256
# A narrow latent is fused too, but only where this many scores (B x Q x h x K) make it worth its transposed copy.
FUSED_LATENT_SCORES = 1 << 24


def _make_shared(s: Step, *, mask_rows: int, rotary: int) -> dict[str, int]:
    """What the first layer's kernels write beside their own: the mask as numbers of the model's type, but as bool where
    the generation phase's kernel takes it. No plugin wants any of it."""
    if s.shared:
        return {}
    narrow = s.is_generation and mask_rows == 1
    mask = s.n["B"] * s.n["Q"] * mask_rows * s.n["K"] * (1 if narrow else s.e)
    turns = s.n["T"] * rotary // 2 * FLOAT32
    return ({"mask": mask} if s.attends else {}) | ({"cos": turns, "sin": turns} if s.rotates else {})


def grouped_attention(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    h, kv, d, n, e = s.a.num_heads, s.a.num_kv_heads, s.a.head_dim, s.n, s.e
    (qkv,) = s.linear(INPUT, normal, out=(h + 2 * kv) * d, width=s.a.hidden_size, qkv=n["T"] * (h + 2 * kv) * d * e)
    rows = n["B"] * n["Q"] if s.attends else n["T"]
    query, *made = s.plan.kernel(qkv, query=rows * h * d * e, **_make_shared(s, mask_rows=1, rotary=d))
    s.shared = s.shared or tuple(made)
    packed = _padded_attention(s, query) if s.attends else _plugin_attention(s, query, h * d)
    (dense,) = s.linear(OUTPUT, packed, out=s.a.hidden_size, width=h * d, dense=s.hidden)
    return add_norm(s, residual, dense)


def _plugin_attention(s: Step, query: Buffer, width: int) -> Buffer:
    """Over the pools themselves, packed rows in and out."""
    (out, _) = s.plan.kernel(
        query, *s.shared, attention=s.n["T"] * width * s.e, attention_workspace=s.attention_scratch
    )
    return out


def _padded_attention(s: Step, query: Buffer) -> Buffer:
    """Over gathered pages → packed rows."""
    h, kv, d, n, e = s.a.num_heads, s.a.num_kv_heads, s.a.head_dim, s.n, s.e
    pages = n["B"] * n["K"] * kv * d * e
    (keys,) = s.plan.kernel(gathered_keys=pages)
    (values,) = s.plan.kernel(gathered_values=pages)
    attention = n["B"] * n["Q"] * h * d * e
    if s.is_generation or (d <= WIDEST_FUSED_HEAD and e < FLOAT32):
        (out,) = s.plan.kernel(query, keys, values, *s.shared, attention=attention)
    else:
        scores = n["B"] * n["Q"] * h * n["K"] * e
        (raw,) = s.plan.gemm(query, keys, scores=scores)
        (soft,) = s.plan.kernel(raw, *s.shared, probabilities=scores)
        (out,) = s.plan.gemm(soft, values, attention=attention)
    (packed,) = s.plan.kernel(out, packed=n["T"] * h * d * e)
    return packed


def latent_attention(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    latent = _latent(s)
    h, t, e = s.a.num_heads, s.n["T"], s.e
    scores = s.n["B"] * s.n["Q"] * h * s.n["K"]
    fused = latent.latent_dim <= WIDEST_FUSED_HEAD and scores >= FUSED_LATENT_SCORES and e < FLOAT32
    content, rotary = _latent_projections(s, latent, normal)
    v = h * latent.v_head_dim
    # Two halves of one weight, dequantized together: the second waits for the attention's output.
    halves = (h * latent.qk_nope_head_dim, v)
    key, value = [s.dequantize("attention_latent", part * latent.kv_lora_rank) for part in halves]
    if s.attends:
        out = (_fused_latent if fused else _decomposed_latent)(s, latent, content, rotary, key)
        (packed,) = s.plan.kernel(out, packed=t * h * latent.kv_lora_rank * e)
    else:
        packed = _plugin_latent(s, latent, content, rotary, key)
    (values,) = s.plan.gemm(packed, *value, values=t * v * e)
    (merged,) = s.plan.kernel(values, merged=t * v * e)
    (dense,) = s.linear(OUTPUT, merged, out=s.a.hidden_size, width=v, dense=s.hidden)
    return add_norm(s, residual, dense)


def _latent_projections(s: Step, latent: LatentAttention, normal: Buffer) -> tuple[Buffer, Buffer]:
    """The query's content part and its rotary part, in float32."""
    h, t, e, rank = s.a.num_heads, s.n["T"], s.e, latent.q_lora_rank
    query, hidden = h * latent.qk_head_dim, s.a.hidden_size
    if rank is None:  # one GEMM makes both
        both = query + latent.latent_dim
        (projected,) = s.linear(INPUT, normal, out=both, width=hidden, query_and_latent=t * both * e)
    else:
        both = rank + latent.latent_dim
        (compressed,) = s.linear(INPUT, normal, out=both, width=hidden, compressed=t * both * e)
        (normal_rank,) = s.plan.kernel(compressed, compressed_normal=t * rank * e)
        (projected,) = s.linear(INPUT, normal_rank, out=query, width=rank, query=t * query * e)
    (wide,) = s.plan.kernel(projected, latent_float32=t * latent.kv_lora_rank * FLOAT32)
    rotary = t * h * latent.qk_rope_head_dim * FLOAT32
    content, row = s.plan.kernel(
        projected, wide, content=t * h * latent.qk_nope_head_dim * e, query_rotary_float32=rotary
    )
    return content, row


def _plugin_latent(s: Step, latent: LatentAttention, content: Buffer, rotary: Buffer, key: Buffers) -> Buffer:
    h, t = s.a.num_heads, s.n["T"]
    (absorbed,) = s.plan.gemm(content, *key, absorbed=t * h * latent.kv_lora_rank * s.e)
    shared = _make_shared(s, mask_rows=h, rotary=latent.qk_rope_head_dim)
    query, *made = s.plan.kernel(absorbed, rotary, query=t * h * latent.latent_dim * s.e, **shared)
    s.shared = s.shared or tuple(made)
    return _plugin_attention(s, query, h * latent.kv_lora_rank)


def _fused_latent(s: Step, latent: LatentAttention, content: Buffer, rotary: Buffer, key: Buffers) -> Buffer:
    """One attention kernel, which wants the gathered latent and its transpose."""
    h, width = s.a.num_heads, latent.latent_dim
    rows, pages = s.n["B"] * s.n["Q"] * h * width * s.e, s.n["B"] * s.n["K"] * width * s.e
    (absorbed,) = s.plan.gemm(content, *key, absorbed=s.n["T"] * h * latent.kv_lora_rank * s.e)
    shared = _make_shared(s, mask_rows=h, rotary=latent.qk_rope_head_dim)
    query, *made = s.plan.kernel(absorbed, rotary, query=rows, **shared)
    s.shared = s.shared or tuple(made)
    both = s.plan.kernel(gathered_latent=pages, gathered_latent_transposed=pages)
    (out,) = s.plan.kernel(query, *both, *s.shared, attention=rows)
    return out


def _decomposed_latent(s: Step, latent: LatentAttention, content: Buffer, rotary: Buffer, key: Buffers) -> Buffer:
    """Two GEMMs around a softmax. K is padded for them by copying, since a dynamic size may be any number."""
    h, width, e = s.a.num_heads, latent.latent_dim, s.e
    pages, rows = s.n["B"] * s.n["K"] * width * e, s.n["B"] * s.n["Q"] * h
    if s.has_streams or pages >= FORKED_GATHER * e:
        s.plan.fork()
    gathered, values = s.plan.kernel(gathered_latent=pages, gathered_latent_padded=pages)
    (turned,) = s.plan.kernel(gathered, gathered_latent_transposed=pages)
    (keys,) = s.plan.kernel(turned, gathered_latent_transposed_padded=pages)
    s.plan.next_stream()
    (absorbed,) = s.plan.gemm(content, *key, absorbed=s.n["T"] * h * latent.kv_lora_rank * s.e)
    s.plan.join()
    (query,) = s.plan.kernel(absorbed, rotary, query=rows * width * e)
    (raw,) = s.plan.gemm(query, keys, scores=rows * s.n["K"] * e)
    # A mask that lies between graphs is read as it is.
    shared = _make_shared(s, mask_rows=h, rotary=latent.qk_rope_head_dim) if s.rotates else {}
    soft, *made = s.plan.kernel(raw, *s.shared, probabilities=rows * s.n["K"] * e, **shared)
    s.shared = s.shared or tuple(made)
    (padded,) = s.plan.kernel(soft, probabilities_padded=rows * s.n["K"] * e)
    (out,) = s.plan.gemm(padded, values, attention=rows * width * e)
    return out


def _latent(s: Step) -> LatentAttention:
    if s.a.latent is None:
        raise TypeError(f"{s.a.name} has no latent attention")
    return s.a.latent
