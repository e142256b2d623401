# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention that reads the paged cache by its block table, with an online softmax (FlashAttention, arXiv 2205.14135).

One program does a tile of one sequence's queries over one key head: ROWS pairs of (query, query head of that key head),
so that the heads that share keys share their loads, too. Where that makes few programs, the keys of sequences with one
token in the step are split over several of them, and `combine` adds up their parts (Flash-Decoding,
pytorch.org/blog/flash-decoding). Scores, the softmax and sums are fp32; probabilities are rounded to the model's type
before they meet the values.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(source, rows, stride, wanted, SIZE: tl.constexpr, TILE: tl.constexpr):
    """[len(rows), TILE] of SIZE columns, zeros elsewhere."""
    column = tl.arange(0, TILE)
    mask = wanted[:, None] & (column < SIZE)[None, :]
    return tl.load(source + rows[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def multiply(a, b, accumulated):
    """fp32 sums. fp32 factors are not cut to TF32."""
    return tl.dot(a, b, accumulated, input_precision="ieee")


@triton.jit
def attend(
    query, k_pool, v_pool, slots, pad, tables, scales, output, partial, stats,
    sequences, queries, least, most, width, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MAIN: tl.constexpr, MAIN_TILE: tl.constexpr,
    EXTRA: tl.constexpr, EXTRA_TILE: tl.constexpr, VALUE: tl.constexpr, VALUE_TILE: tl.constexpr,
    LATENT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """query [T, HEADS, MAIN + EXTRA]. LATENT: the values are the first MAIN columns of the keys. Done are the sequences
    that have `least` to `most` rows; SPLIT: one row. See operation.py."""
    group: tl.constexpr = HEADS // KV_HEADS
    size: tl.constexpr = MAIN + EXTRA
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2) // splits
    split = tl.program_id(2) % splits

    first_slot = tl.load(slots + tl.load(pad + sequence * queries))
    last_slot = tl.load(slots + tl.load(pad + sequence * queries + queries - 1))
    count = last_slot - first_slot + 1
    if (count < least) | (count > most) | (tile * ROWS >= count * group):
        return
    member = tile * ROWS + tl.arange(0, ROWS)
    index = member // group
    wanted = index < count
    row = tl.load(pad + sequence * queries + index, mask=wanted, other=0)
    place = row * HEADS + kv_head * group + member % group
    q = load_rows(query, place, size, wanted, MAIN, MAIN_TILE)
    if EXTRA:
        q_extra = load_rows(query + MAIN, place, size, wanted, EXTRA, EXTRA_TILE)
    slot = first_slot + index

    # The keys of this tile: up to its last query's own, from the window of its first on; this split's part of them.
    end = first_slot + tl.minimum((tile * ROWS + ROWS - 1) // group, count - 1) + 1
    start = 0
    if WINDOW:
        start = tl.maximum(first_slot + (tile * ROWS) // group - WINDOW + 1, 0) // KEYS * KEYS
    if SPLIT:
        share = ((end - start + splits - 1) // splits + KEYS - 1) // KEYS * KEYS
        start += split * share
        end = tl.minimum(end, start + share)

    key_scale, extra_scale, value_scale = 1.0, 1.0, 1.0
    if QUANTIZED:
        key_scale = tl.load(scales + kv_head)
        extra_scale = tl.load(scales + 1)
        value_scale = key_scale
        if not LATENT:
            value_scale = tl.load(scales + KV_HEADS + kv_head)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    offset = tl.arange(0, KEYS)
    all_keys = offset < KEYS
    for at in range(start, end, KEYS):
        page = tl.load(tables + sequence * width + at // BLOCK).to(tl.int64)
        entry = (page * KV_HEADS + kv_head) * BLOCK + at % BLOCK + offset
        k = load_rows(k_pool, entry, size, all_keys, MAIN, MAIN_TILE).to(q.dtype)
        scores = multiply(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32)) * key_scale
        if EXTRA:
            k_extra = load_rows(k_pool + MAIN, entry, size, all_keys, EXTRA, EXTRA_TILE).to(q.dtype)
            scores += multiply(q_extra, tl.trans(k_extra), tl.zeros([ROWS, KEYS], tl.float32)) * extra_scale
        key = at + offset
        allowed = key[None, :] <= slot[:, None]
        if WINDOW:
            allowed = allowed & (key[None, :] > slot[:, None] - WINDOW)
        scores = tl.where(allowed, scores * LOG2E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet must not make -inf - -inf.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(shares, 1)
        v = k
        if not LATENT:
            v = load_rows(v_pool, entry, VALUE, all_keys, VALUE, VALUE_TILE).to(q.dtype)
        sums = multiply(shares.to(q.dtype), v, sums * fade[:, None])
        highest = higher

    sums = sums * value_scale
    column = tl.arange(0, VALUE_TILE)
    mask = wanted[:, None] & (column < VALUE)[None, :]
    if SPLIT:
        first = (split * sequences + sequence).to(tl.int64) * HEADS + kv_head * group
        tl.store(partial + first * VALUE + member[:, None] * VALUE + column[None, :], sums, mask=mask)
        tl.store(stats + first * 2 + member * 2, highest, mask=wanted)
        tl.store(stats + first * 2 + member * 2 + 1, total, mask=wanted)
    else:
        whole = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        place = place[:, None].to(tl.int64) * VALUE
        tl.store(output + place + column[None, :], whole.to(output.dtype.element_ty), mask=mask)


@triton.jit
def combine(
    partial, stats, pad, output, sequences, queries, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one sequence's row and head: each with its own maximum, which the others are scaled to."""
    sequence = tl.program_id(0)
    row = tl.load(pad + sequence * queries).to(tl.int64)
    if row != tl.load(pad + sequence * queries + queries - 1):
        return  # it has more than one row
    place = sequence.to(tl.int64) * HEADS + tl.program_id(1)
    column = tl.arange(0, VALUE_TILE)
    mask = column < VALUE
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([VALUE_TILE], tl.float32)
    step = sequences.to(tl.int64) * HEADS
    for split in range(splits):
        at = place + split * step
        one = tl.load(stats + at * 2 + tl.arange(0, 1))
        part = tl.load(stats + at * 2 + 1 + tl.arange(0, 1))
        higher = tl.maximum(highest, one)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(highest - base), tl.exp2(one - base)
        sums = sums * fade + tl.load(partial + at * VALUE + column, mask=mask, other=0.0) * weight
        total = total * fade + part * weight
        highest = higher
    whole = sums / tl.where(total == 0.0, 1.0, total)
    place = row * HEADS + tl.program_id(1)
    tl.store(output + place * VALUE + column, whole.to(output.dtype.element_ty), mask=mask)
