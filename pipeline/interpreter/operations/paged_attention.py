"""Attention over the blocks of a cache, as rules/attention.py parts it. B sequences, N heads, Q and K rows, D head
size, T packed rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.native import Call, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel, adapt
from pipeline.interpreter.numerics import NATIVE, multiplied_as
from pipeline.interpreter.operations.attention import cache_rows, mask_bias, write_rows
from pipeline.interpreter.operations.movement import select_rows
from pipeline.interpreter.operations.page_calls import Pages
from pipeline.interpreter.operations.products import ROWS, fill_rows
from pipeline.interpreter.operations.site import Kernel, Site

# Exact mode: keys come in multiples of this, so that a row's softmax adds in one order, however far it is padded.
KEYS = 64
MOST_SCORES = 1 << 24  # of a layer held at once in exact mode, 64 MiB
# Fast mode: between these numbers of scores per head, and in all, plain products are up to three times as fast as
# torch's fused attention. They round scores and probabilities to bf16, as transformers' eager attention does.
FEWEST_PLAIN, MOST_PLAIN = 1 << 8, 1 << 24


def compile_cache_rows(site: Site) -> Kernel:
    heads, size = site.attribute("heads"), site.attribute("size")
    return lambda starts, lengths: cache_rows(starts, lengths, heads, size)


def compile_write_cache_rows(site: Site) -> Kernel:
    return write_rows


def compile_attention_bias(site: Site) -> Kernel:
    """[B or 1, 1, Q, K] → the same, or repeated for the query heads that share a key head and are folded into rows."""
    groups, dtype = site.attribute("groups"), _attention_type(site)

    def bias(mask: Tensor) -> Tensor:
        added = mask_bias(mask, dtype)
        return added if groups == 1 or added.shape[2] == 1 else added.repeat(1, 1, groups, 1)

    def bias_in_steady_sizes(mask: Tensor) -> Tensor:
        added = bias(mask)
        more_keys = F.pad(added, (0, -added.shape[3] % KEYS), value=-torch.inf)
        return more_keys if added.shape[2] == 1 else F.pad(more_keys, (0, 0, 0, -added.shape[2] % ROWS))

    return bias_in_steady_sizes if site.numerics.mode == "exact" else bias


def compile_attend(site: Site) -> Kernel:
    """torch's fused CPU attention. Query heads that share a key head become rows of it, so that nothing is repeated."""
    if site.numerics.mode == "exact":
        return _compile_attend_exact(site)
    held, inner = site.held(), _attention_type(site)
    heads, kv_heads = site.spec(0).shape[1], site.spec(1).shape[1]
    fast = site.numerics.mode == "fast"

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        batch, _, queries, width = q.shape
        if heads != kv_heads:
            q = q.reshape(batch, kv_heads, -1, width)
        scores_per_head = batch * queries * k.shape[2]
        if fast and scores_per_head >= FEWEST_PLAIN and scores_per_head * heads <= MOST_PLAIN:
            scores = torch.matmul(q, k.transpose(-1, -2)).add_(bias)
            result = torch.matmul(torch.softmax(scores, dim=-1), v)
            return result if heads == kv_heads else result.reshape(batch, heads, queries, -1)
        if inner is not held:
            same = k is v
            q, k = q.to(inner), k.to(inner)
            v = k if same else v.to(inner)
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        if inner is not held:
            result = result.to(held)
        return result if heads == kv_heads else result.reshape(batch, heads, queries, -1)

    return attend


def _compile_attend_exact(site: Site) -> Kernel:
    """Plain products in steady sizes, because torch's fused attention blocks by the number of queries: each row comes
    out bit for bit the same whatever the other sequences, the length of its chunk, and how far both are padded."""
    heads, kv_heads = site.spec(0).shape[1], site.spec(1).shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        batch, _, queries, width = q.shape
        q = q.reshape(batch, kv_heads, -1, width)
        rows, filled = q.shape[2], fill_rows(q)
        same, k = k is v, fill_rows(k, KEYS)
        v = k if same else fill_rows(v, KEYS)
        block = max(MOST_SCORES // (batch * kv_heads * k.shape[2]) // ROWS, 1) * ROWS
        parts = []
        for first in range(0, filled.shape[2], block):
            scores = torch.matmul(filled[:, :, first : first + block], k.transpose(-1, -2))
            scores += bias if bias.shape[2] == 1 else bias[:, :, first : first + block]
            parts.append(torch.matmul(torch.softmax(scores, dim=-1), v))
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return result[:, :, :rows].reshape(batch, heads, queries, -1)

    return attend


def _attention_type(site: Site) -> torch.dtype:
    return multiplied_as(site.held())


def compile_attend_pages(site: Site) -> Kernel:
    """Attention over the blocks of the cache: where each sequence has one row, in C and without copying them; else over
    a copy. Inputs: q [B, N, Q, D], the pools of keys and values, block table [B, MB], page rows, bias."""
    held, library = site.held(), load_library()
    gather, attend_copies = compile_gather_pages(site), compile_attend(site)

    def attend(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = attend_copies(q, gather(keys, table, rows), gather(values, table, rows), bias)
        return result

    if library is None or held not in NATIVE:
        return attend

    pages = _find_pages(site)

    def plan(
        empty: Empty, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor
    ) -> Call | None:
        if q.shape[2] != 1 or bias.shape[2] != 1:
            return None
        call = pages.plan_single(empty, q, keys, values, table, bias)
        return None if call is None else replace(call, outputs=call.outputs.unsqueeze(2))

    return NativeKernel(library=library, plan=plan, otherwise=attend)


def _find_pages(site: Site) -> Pages:
    (_, kv_heads, size, width), v_width = site.spec(1).shape, site.spec(2).shape[3]
    heads = site.spec(0).shape[1]
    return Pages(held=site.held(), heads=heads, kv_heads=kv_heads, size=size, width=width, v_width=v_width)


def compile_attend_packed(site: Site) -> Kernel:
    """Packed rows q [T, N, D] laid out by sequence, attention, its rows [T, N * D] packed again. Inputs: as of
    attend_pages; the index that lays out and that which packs, each with its rows (row_index). In C nothing has to be
    laid out."""
    attend, take = compile_attend_pages(site), compile_take_rows(site)
    single = adapt(attend, lambda q, *rest: (q.unsqueeze(2), *rest[:5]), lambda y: y.flatten(1))

    def run(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor, *places: Any) -> Tensor:
        pad, pad_rows, unpad, unpad_rows = places
        y = attend(take(q, pad, pad_rows).permute(0, 2, 1, 3), keys, values, table, rows, bias)
        packed: Tensor = take(y.permute(0, 2, 1, 3).flatten(2).flatten(0, 1), unpad, unpad_rows)
        return packed

    if not isinstance(single, NativeKernel):
        return lambda *inputs: single(*inputs) if _is_single(*inputs) else run(*inputs)
    plan_single, pages = single.plan, _find_pages(site)

    def plan(empty: Empty, *inputs: Any) -> Call | None:
        if _is_single(*inputs):
            return plan_single(empty, *inputs)
        q, keys, values, table, _, bias, pad, _, unpad, _ = inputs
        return pages.plan_chunks(empty, q, keys, values, table, bias, pad, unpad)

    return replace(single, plan=plan, otherwise=run)


def compile_attend_latent(site: Site) -> Kernel:
    """The same of latent attention: one pool [blocks, 1, size, D] of keys, whose first values are the values, and the
    heads of a query are rows next to each other, of the bias as well. → [T, N, v_width]."""
    held, library, heads, v_width = site.held(), load_library(), site.attribute("heads"), site.attribute("width")
    _, _, size, width = site.spec(1).shape
    folded = replace(site.spec(0), shape=(-1, 1, -1, width))
    attend, take = compile_attend(replace(site, inputs=(folded, site.spec(1)))), compile_take_rows(site)

    def run(q: Tensor, pool: Tensor, table: Tensor, bias: Tensor, *places: Any) -> Tensor:
        pad, pad_rows, unpad, unpad_rows = places
        batch, columns = table.shape
        latents = torch.index_select(pool.view(-1, size * width), 0, table.reshape(-1))
        latents = latents.view(batch, 1, columns * size, width)
        rows = take(q, pad, pad_rows).reshape(batch, 1, -1, width)
        y = attend(rows, latents, latents, bias).reshape(-1, heads, width)[..., :v_width]
        packed: Tensor = take(y, unpad, unpad_rows)
        return packed

    if site.numerics.mode != "fast" or library is None or held not in NATIVE:
        return run
    pages = Pages(held=held, heads=heads, kv_heads=1, size=size, width=width, v_width=v_width, bias_rows=heads)

    def plan(empty: Empty, q: Tensor, pool: Tensor, table: Tensor, bias: Tensor, *places: Any) -> Call | None:
        pad, _, unpad, _ = places
        if _is_single(q, pool, pool, table, table, bias, *places):
            return pages.plan_single(empty, q, pool, pool, table, bias)
        call = pages.plan_chunks(empty, q, pool, pool, table, bias, pad, unpad)
        return None if call is None else replace(call, outputs=call.outputs.view(-1, heads, v_width))

    return NativeKernel(library=library, plan=plan, otherwise=run)


def _is_single(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor, *places: Any
) -> bool:
    pad, pad_rows, unpad, unpad_rows = places
    return pad_rows is None and unpad_rows is None and len(q) == len(table) == pad.numel() == unpad.numel()


def compile_page_rows(site: Site) -> Kernel:
    """Block table [B, MB] → rows of the pool seen as [blocks * N, …], in the order B, N, MB."""
    heads = torch.arange(site.attribute("heads")).reshape(1, -1, 1)
    count = site.attribute("heads")
    return lambda table: (table.to(torch.int64).unsqueeze(1) * count + heads).reshape(-1)


def compile_gather_pages(site: Site) -> Kernel:
    """[blocks, N, block, D] → [B, N, MB * block, D]."""

    def gather(pool: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        _, heads, size, width = pool.shape
        batch, columns = table.shape
        pages = torch.index_select(pool.view(-1, size * width), 0, rows)
        return pages.view(batch, heads, columns * size, width)

    return gather


def compile_row_index(site: Site) -> Kernel:
    """The index as a list of rows; None where it asks for the first rows in their order."""

    def rows(index: Tensor) -> Tensor | None:
        flat = index.reshape(-1)
        return None if torch.equal(flat, torch.arange(len(flat), dtype=flat.dtype)) else flat

    return rows


def compile_take_rows(site: Site) -> Kernel:
    """[T, …] by an index of any shape → [*index, …]."""

    def take(x: Tensor, index: Tensor, rows: Tensor | None) -> Tensor:
        count = index.numel()
        taken = select_rows(x, 0, rows) if rows is not None else x if len(x) == count else x.narrow(0, 0, count)
        return taken if index.dim() == 1 else taken.reshape(*index.shape, *x.shape[1:])

    return take
