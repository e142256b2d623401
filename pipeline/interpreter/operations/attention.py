"""Attention and what surrounds it: rotary embedding and the cache update.

B sequences, N heads, Q query rows, K key rows, S rows, D head size, T packed rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.interpreter.operations.site import Kernel, Site

Places = tuple[Tensor, Tensor | None]  # see cache_rows


def compile_rotary_embedding(site: Site) -> Kernel:
    """Inputs: data [B, N, S, D], cos and sin [positions, d/2], position ids [B, S] (without: tables [B, S, d/2]).

    Computed in fp32 and rounded once. Rotates the first d of D; `interleaved` pairs even and odd, else the two halves.
    """
    indexed = site.optional(3) is not None
    rotate = compile_rotation(site)
    if not indexed:
        return lambda x, cos, sin: rotate(x, cos.float().unsqueeze(1), sin.float().unsqueeze(1))
    return lambda x, cos, sin, positions: rotate(
        x, cos[positions].float().unsqueeze(1), sin[positions].float().unsqueeze(1)
    )


def compile_rotation(site: Site) -> Kernel:
    """Rotates by tables that are already [B, 1, S, d/2] in fp32."""
    held, interleaved, width = site.held(), bool(site.attribute("interleaved")), site.spec(0).shape[-1]
    dim = int(site.attribute("dim")) or width
    if dim % 2 or not 0 < dim <= width:
        raise site.refuse(f"dim {dim} does not fit a head of {width}")
    half = dim // 2

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = x[..., :dim].float()
        if interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        rotated = rotated.to(held)
        return rotated if dim == width else torch.cat((rotated, x[..., dim:]), dim=-1)

    return rotate


def compile_kv_cache_update(site: Site) -> Kernel:
    """Writes the cache [blocks, N, S, D] in place and returns it; rows beyond S are dropped, as TensorRT documents.

    Packed: row r of update [T, N, D] belongs to the block b with update_lengths[b] <= r < update_lengths[b+1], and goes
    to its row write_indices[b] + r - update_lengths[b].
    """
    site.require("mode", "linear")
    site.require("form", "packed_nhd", "padded_bhnd")
    if site.attribute("form") == "padded_bhnd":
        return _write_padded
    if site.optional(3) is None:
        raise site.refuse("packed without update_lengths")
    return lambda cache, update, starts, lengths: write_rows(
        cache, update, cache_rows(starts, lengths, cache.shape[1], cache.shape[2])
    )


def cache_rows(starts: Tensor, lengths: Tensor, heads: int, size: int) -> Places:
    """Where packed rows go: their index into the cache flattened to [blocks * heads * size], for each row and head,
    and, where some rows fall outside their block, which rows stay (else None)."""
    bounds = lengths.numpy().astype(np.int64)  # a dozen small steps: numpy's calls cost a fifth of torch's
    counts = np.diff(bounds)
    blocks = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(blocks)) + (starts.numpy().astype(np.int64) - bounds[:-1])[blocks]
    inside = (offsets >= 0) & (offsets < size)
    kept = None
    if not inside.all():
        (places,) = inside.nonzero()
        blocks, offsets, kept = blocks[places], offsets[places], torch.from_numpy(places)
    rows = (blocks * (heads * size) + offsets)[:, None] + np.arange(heads) * size
    return torch.from_numpy(rows.reshape(-1)), kept


def write_rows(cache: Tensor, update: Tensor, target: Places) -> Tensor:
    rows, kept = target
    if kept is not None:
        update = update[kept]
    width = cache.shape[-1]
    cache.view(-1, width).index_copy_(0, rows, update.reshape(-1, width))
    return cache


def _write_padded(cache: Tensor, update: Tensor, starts: Tensor) -> Tensor:
    size, length = cache.shape[2], update.shape[2]
    for block, start in enumerate(starts.tolist()):
        first, last = max(start, 0), min(start + length, size)
        if first < last:
            cache[block, :, first:last] = update[block, :, first - start : last - start]
    return cache


def compile_attention(site: Site) -> Kernel:
    """softmax(q k^T, masked) v, without a scale of its own. Query head i reads key head i * kv_heads // heads.

    Scores and probabilities are fp32 inside, in both modes; the result is rounded once. A row whose mask is all false
    is NaN, as 0/0 would be.
    """
    masked, causal, held = check_attention(site), site.attribute("causal"), site.held()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
        if causal != "none":
            scores = scores + causal_bias(causal, scores.shape[-2], scores.shape[-1])
        if mask is not None:
            scores = scores + mask_bias(mask)
        return torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(held)

    if causal != "none" and masked:
        raise site.refuse("both causal and masked")
    return attend


def check_attention(site: Site) -> bool:
    """Refuses what no kernel here computes; says whether there is a mask."""
    site.require("normalization", "softmax")
    site.require("query_form", "padded_bhnd")
    site.require("key_value_form", "padded_bhnd")
    site.require("causal", "none", "upper_left", "lower_right")
    heads, kv_heads = site.spec(0).shape[1], site.spec(1).shape[1]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise site.refuse(f"{heads} query heads over {kv_heads} key heads")
    return site.optional(3) is not None


def mask_bias(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What is added to the scores: a bool mask's 0 where true and -inf where false, an additive mask itself."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def causal_bias(kind: str, queries: int, keys: int) -> Tensor:
    """Upper left: query i sees keys up to i; lower right: up to i + keys - queries."""
    offset = 0 if kind == "upper_left" else keys - queries
    return mask_bias(torch.ones(queries, keys, dtype=torch.bool).tril(offset))
