"""What the kernels compute, in plain torch: sequence by sequence, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention

# Rows and keys come in multiples of these, zeros filled up, so that a row's sums are added in one order whatever other
# rows there are and wherever its chunk began.
ROWS, KEYS = 8, 64


def attend(op: PagedAttention, query: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Tensor) -> Tensor:
    """[T, heads, head_size]. See PagedAttention."""
    slots, pad, tables, *scales = rest
    result = torch.empty_like(query)
    for rows, places, table in _sequences(slots, pad, tables, op.block_size):
        k, v = (_pages(pool, table) for pool in (k_pool, v_pool))
        if scales:
            k, v = k * scales[0][0, :, None, None], v * scales[0][1, :, None, None]
        result[rows] = _softmax_sum(query[rows], k, v, places, op.window).to(query.dtype)
    return result


def attend_latent(op: PagedLatentAttention, query: Tensor, pool: Tensor, *rest: Tensor) -> Tensor:
    """[T, heads, rank]. See PagedLatentAttention."""
    slots, pad, tables, *scales = rest
    result = query.new_empty((*query.shape[:2], op.rank))
    for rows, places, table in _sequences(slots, pad, tables, op.block_size):
        k = _pages(pool, table)
        if scales:
            k[..., : op.rank] *= scales[0][0]
            k[..., op.rank :] *= scales[0][1]
        result[rows] = _softmax_sum(query[rows], k, k[..., : op.rank], places, op.window).to(query.dtype)
    return result


def _sequences(slots: Tensor, pad: Tensor, tables: Tensor, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each sequence its rows, their places in the cache, and the blocks up to the last of them."""
    found = []
    for index, table in zip(pad.long(), tables.long(), strict=True):
        first, last = int(slots[index[0]]), int(slots[index[-1]])
        rows = index[: last - first + 1]
        found.append((rows, slots[rows].long(), table[: last // block_size + 1]))
    return found


def _pages(pool: Tensor, table: Tensor) -> Tensor:
    """[heads, keys, D] in fp32, the keys filled up to a multiple."""
    pages = pool[table].float().transpose(0, 1).flatten(1, 2)
    return F.pad(pages, (0, 0, 0, -pages.shape[1] % KEYS))


def _softmax_sum(query: Tensor, k: Tensor, v: Tensor, places: Tensor, window: int) -> Tensor:
    """query [n, heads, D], k and v [kv_heads, keys, D] → [n, heads, D of v]."""
    count, heads, _ = query.shape
    filled = F.pad(query.float(), (0, 0, 0, 0, 0, -count % ROWS))
    places = F.pad(places, (0, len(filled) - count))
    by_head = filled.transpose(0, 1).reshape(len(k), -1, query.shape[-1])  # heads that share keys side by side
    scores = torch.matmul(by_head, k.transpose(-1, -2)).reshape(heads, len(filled), -1)
    keys = torch.arange(k.shape[1], device=k.device)
    hidden = keys > places[:, None]
    if window:
        hidden |= keys <= places[:, None] - window
    shares = torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1)
    sums = torch.matmul(shares.reshape(len(k), -1, k.shape[1]), v)
    return sums.reshape(heads, len(filled), -1).transpose(0, 1)[:count]
