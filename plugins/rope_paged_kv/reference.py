"""What the kernels compute, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # of the types of a quantized pool


def rotate_and_append(op: RopePagedKv, qkv: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """See RopePagedKv."""
    positions, slots, unpad, pad, tables, k_pool, v_pool, *scales = rest
    heads = qkv.reshape(len(qkv), op.heads + 2 * op.kv_heads, op.head_size)
    q, k, v = torch.split(heads, [op.heads, op.kv_heads, op.kv_heads], dim=1)
    turns = cos[positions].float(), sin[positions].float()
    query = (_rotate(q, turns, op.rotary_size, op.interleaved) * op.scale).to(qkv.dtype)
    key = _rotate(k, turns, op.rotary_size, op.interleaved)
    blocks, places = find_places(slots, unpad, pad, tables, op.block_size)
    scale = scales[0].reshape(2, op.kv_heads, 1) if scales else None
    _write(k_pool, blocks, places, _store(key, k_pool.dtype, None if scale is None else scale[0]))
    _write(v_pool, blocks, places, _store(v.float(), v_pool.dtype, None if scale is None else scale[1]))
    return query, k_pool, v_pool


def rotate_and_append_latent(
    op: RopePagedLatent, q: Tensor, absorbed: Tensor, content: Tensor, compressed: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    """See RopePagedLatent."""
    cos, sin, positions, slots, unpad, pad, tables, pool, *scales = rest
    turns = cos[positions].float(), sin[positions].float()
    rotary = q.reshape(len(q), op.heads, op.q_size)[..., op.q_size - op.rotary_size :]
    turned = _rotate(rotary, turns, op.rotary_size, op.interleaved)
    query = (torch.cat((absorbed.transpose(0, 1).float(), turned), dim=-1) * op.scale).to(q.dtype)
    key = _rotate(compressed[:, None, op.rank :], turns, op.rotary_size, op.interleaved)[:, 0]
    blocks, places = find_places(slots, unpad, pad, tables, op.block_size)
    content_scale, key_scale = scales[0] if scales else (None, None)
    row = _store(content.float(), pool.dtype, content_scale), _store(key, pool.dtype, key_scale)
    _write(pool, blocks, places, torch.cat([_plain(part) for part in row], dim=-1)[:, None])
    return query, pool


def find_places(slots: Tensor, unpad: Tensor, pad: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The block of each row, and its place there."""
    sequence = unpad.long() // pad.shape[1]
    return tables[sequence, slots.long() // block_size].long(), slots.long() % block_size


def _write(pool: Tensor, blocks: Tensor, places: Tensor, rows: Tensor) -> None:
    """rows [T, heads, D] into pool [NB, heads, block, D]."""
    _plain(pool)[blocks, :, places] = _plain(rows)


def _plain(x: Tensor) -> Tensor:
    """FP8 as bytes: torch cannot move it otherwise."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], size: int, interleaved: bool) -> Tensor:
    """The first `size` of [T, heads, D], in fp32; the rest as it is."""
    cos, sin = (turn[:, None] for turn in turns)
    x, rest = x[..., :size].float(), x[..., size:].float()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _store(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """fp32 as the pool holds it: rounded to its type, after division by the scale where it is quantized."""
    if scale is None:
        return x.to(dtype)
    largest = LARGEST[dtype]
    scaled = (x / scale).clamp(-largest, largest)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype)
