"""Attention over the blocks of a cache, as rules/attention.py parts it. B sequences, N heads, Q and K rows, D head
size, T packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel, adapt
from pipeline.interpreter.numerics import NATIVE, multiplied_as
from pipeline.interpreter.operations.attention import cache_rows, mask_bias, write_rows
from pipeline.interpreter.operations.movement import select_rows
from pipeline.interpreter.operations.products import ROWS, fill_rows
from pipeline.interpreter.operations.site import Kernel, Site

# Exact mode: keys come in multiples of this, so that a row's softmax adds in one order, however far it is padded.
KEYS = 64
MOST_SCORES = 1 << 24  # of a layer held at once in exact mode, 64 MiB
# Fast mode: between these numbers of scores per head, and in all, plain products are up to three times as fast as
# torch's fused attention. They round scores and probabilities to bf16, as transformers' eager attention does.
FEWEST_PLAIN, MOST_PLAIN = 1 << 8, 1 << 24
CHUNK_WIDTH, CHUNK_ROWS = 32, 64  # as in native/chunks.c: columns in multiples, and rows at a time
FEWEST_SHARED = 1 << 15  # multiplications, from which on another thread helps: among other calls it is awake


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
    heads, (_, kv_heads, size, width), v_width = site.spec(0).shape[1], site.spec(1).shape, site.spec(2).shape[3]

    def attend(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = attend_copies(q, gather(keys, table, rows), gather(values, table, rows), bias)
        return result

    if library is None or held not in NATIVE:
        return attend

    def plan(
        empty: Empty, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor
    ) -> Call | None:
        if q.shape[2] != 1:
            return None
        batch, columns = table.shape
        length = columns * size
        bias = bias.expand(batch, 1, 1, length)
        if bias.stride(3) != 1 or not all(tensor.is_contiguous() for tensor in (q, keys, values, table)):
            return None
        if len(values) != len(keys):
            return None
        y = empty((batch, heads, 1, v_width), dtype=held)
        threads = count_threads(batch * heads * length * width, FEWEST_SHARED)
        return Call(
            kernel="attend_pages",
            arguments=(
                held is torch.bfloat16,
                q.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                table.data_ptr(),
                bias.data_ptr(),
                y.data_ptr(),
                len(keys),
                batch,
                heads,
                kv_heads,
                columns,
                size,
                width,
                v_width,
                bias.stride(0),
            ),
            outputs=y,
            scratch=4 * threads * (heads // kv_heads) * (length + v_width),
            threads=threads,
            refusal=f"the block table names blocks that are none of the {len(keys)} of the cache",
        )

    return NativeKernel(library=library, plan=plan, otherwise=attend)


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
    plan_single, plan_chunks = single.plan, _plan_chunks(site)

    def plan(empty: Empty, *inputs: Any) -> Call | None:
        return plan_single(empty, *inputs) if _is_single(*inputs) else plan_chunks(empty, *inputs)

    return replace(single, plan=plan, otherwise=run)


def _is_single(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, bias: Tensor, *places: Any
) -> bool:
    pad, pad_rows, unpad, unpad_rows = places
    return pad_rows is None and unpad_rows is None and len(q) == len(table) == pad.numel() == unpad.numel()


def _plan_chunks(site: Site) -> Callable[..., Call | None]:
    """Several rows of a sequence, in C where products are of fp32: where they are of bf16, torch's are as fast."""
    held, heads, (_, kv_heads, size, width) = site.held(), site.spec(0).shape[1], site.spec(1).shape
    v_width = site.spec(2).shape[3]
    fits = held is torch.float32 and size % CHUNK_WIDTH == 0 and v_width % CHUNK_WIDTH == 0

    def plan(empty: Empty, *inputs: Any) -> Call | None:
        q, keys, values, table, _, bias, pad, _, unpad, _ = inputs
        (batch, columns), rows, tensors = table.shape, len(q), (q, keys, values, table, bias, pad, unpad)
        group, length, queries = heads // kv_heads, columns * size, pad.numel() // max(batch, 1)
        if not fits or not all(tensor.is_contiguous() for tensor in tensors):
            return None
        if {q.dtype, bias.dtype} != {held} or {pad.dtype, unpad.dtype} != {torch.int32}:
            return None
        biased = len(bias) in (1, batch) and bias.shape[2] in (1, queries * group) and bias.shape[3] == length
        if not biased or len(pad) != batch or unpad.numel() != rows or len(values) != len(keys):
            return None
        y = empty((rows, heads * v_width), dtype=held)
        most = group * max(1, CHUNK_ROWS // group)
        threads = count_threads(rows * heads * length * width, FEWEST_SHARED)
        return Call(
            kernel="attend_chunks",
            arguments=(
                *(tensor.data_ptr() for tensor in (*tensors, y)),
                rows,
                len(keys),
                batch,
                queries,
                heads,
                kv_heads,
                columns,
                size,
                width,
                v_width,
                0 if len(bias) == 1 else bias.stride(0),
                0 if bias.shape[2] == 1 else length,
            ),
            outputs=y,
            scratch=4 * threads * (most * (width + size + v_width + 2) + width * size),
            threads=threads,
            refusal=f"the block table names blocks that are none of the {len(keys)} of the cache, or rows are not "
            "packed again as they were laid out",
        )

    return plan


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
