# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary embedding and the write into the paged cache, in one pass over the projections' output.

One program does one row and a few heads of it: q heads first, then k, then v. All sizes are constants, so that loads
are as wide as they can be; only the step's own numbers are arguments. Arithmetic is fp32, rounded once.
"""

import triton
import triton.language as tl

# How a pool's rows are stored.
PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Adding and taking away 1.5 * 2**23 rounds an fp32 of less than 2**22 to the nearest integer, ties to even.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def store_quantized(target, x, scale, mask, STORAGE: tl.constexpr):
    """x fp32, divided by the scale and rounded where the pool is quantized."""
    if STORAGE == INT8:
        x = tl.minimum(tl.maximum(x / scale, -127.0), 127.0)
        x = (x + ROUND) - ROUND
    if STORAGE == FP8:
        x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def find_place(slots, unpad, tables, row, queries, width, BLOCK: tl.constexpr):
    """Where a row is written: its block, as int64 (a pool may have more than 2**31 elements), and its place there."""
    slot = tl.load(slots + row)
    sequence = tl.load(unpad + row) // queries
    block = tl.load(tables + sequence * width + slot // BLOCK)
    return block.to(tl.int64), slot % BLOCK


@triton.jit
def rotate_row(
    source, target, heads, wanted, source_stride, target_stride, cos, sin, factor, scale,
    PAIRS: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Rotates the first ROTARY elements of each head and stores them, times `factor`."""
    if PAIRS:
        column = tl.arange(0, 2 * HALF)
        mask = wanted[:, None] & (column < ROTARY)[None, :]
        x = tl.load(source + heads[:, None] * source_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
        first = (even * cos[None, :] - odd * sin[None, :]) * factor
        second = (odd * cos[None, :] + even * sin[None, :]) * factor
        turned = tl.reshape(tl.join(first, second), [x.shape[0], 2 * HALF])
        store_quantized(target + heads[:, None] * target_stride + column[None, :], turned, scale, mask, STORAGE)
    else:
        column = tl.arange(0, HALF)
        mask = wanted[:, None] & (column < ROTARY // 2)[None, :]
        place = source + heads[:, None] * source_stride + column[None, :]
        left = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(place + ROTARY // 2, mask=mask, other=0.0).to(tl.float32)
        first = (left * cos[None, :] - right * sin[None, :]) * factor
        second = (right * cos[None, :] + left * sin[None, :]) * factor
        place = target + heads[:, None] * target_stride + column[None, :]
        store_quantized(place, first, scale, mask, STORAGE)
        store_quantized(place + ROTARY // 2, second, scale, mask, STORAGE)


@triton.jit
def copy_row(
    source, target, heads, wanted, source_stride, target_stride, factor, scale,
    SIZE: tl.constexpr, TILE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Stores SIZE elements of each head, times `factor`."""
    column = tl.arange(0, TILE)
    mask = wanted[:, None] & (column < SIZE)[None, :]
    x = tl.load(source + heads[:, None] * source_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    place = target + heads[:, None] * target_stride + column[None, :]
    store_quantized(place, x * factor, scale, mask, STORAGE)


@triton.jit
def load_turns(cos, sin, positions, row, ROTARY: tl.constexpr, HALF: tl.constexpr):
    column = tl.arange(0, HALF)
    at = tl.load(positions + row) * (ROTARY // 2) + column
    mask = column < ROTARY // 2
    return tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def write_heads(
    qkv, cos, sin, positions, slots, unpad, tables, scales, query, k_pool, v_pool, rows, queries, width, factor,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROTARY: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, TAKE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """qkv [T, (HEADS + 2 KV_HEADS) * SIZE], rows STRIDE apart. See RopePagedKv."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (HEADS + TAKE - 1) // TAKE
    kv_groups: tl.constexpr = (KV_HEADS + TAKE - 1) // TAKE
    source = qkv + row.to(tl.int64) * STRIDE
    if group < q_groups:
        heads = group * TAKE + tl.arange(0, TAKE)
        wanted = heads < HEADS
        target = query + row.to(tl.int64) * (HEADS * SIZE)
        c, s = load_turns(cos, sin, positions, row, ROTARY, HALF)
        rotate_row(source, target, heads, wanted, SIZE, SIZE, c, s, factor, 1.0, PAIRS, ROTARY, HALF, PLAIN)
        if ROTARY < SIZE:
            copy_row(
                source + ROTARY, target + ROTARY, heads, wanted, SIZE, SIZE, factor, 1.0, SIZE - ROTARY, REST, PLAIN
            )
    else:
        block, place = find_place(slots, unpad, tables, row, queries, width, BLOCK)
        offset = (block * (KV_HEADS * BLOCK) + place) * SIZE
        is_key = group < q_groups + kv_groups
        heads = (group - q_groups - tl.where(is_key, 0, kv_groups)) * TAKE + tl.arange(0, TAKE)
        wanted = heads < KV_HEADS
        scale = tl.full([TAKE, 1], 1.0, tl.float32)
        if is_key:
            source += HEADS * SIZE
            entry = k_pool + offset
            if STORAGE != PLAIN:
                scale = tl.load(scales + heads, mask=wanted, other=1.0)[:, None]
            c, s = load_turns(cos, sin, positions, row, ROTARY, HALF)
            rotate_row(source, entry, heads, wanted, SIZE, BLOCK * SIZE, c, s, 1.0, scale, PAIRS, ROTARY, HALF, STORAGE)
            if ROTARY < SIZE:
                copy_row(
                    source + ROTARY, entry + ROTARY, heads, wanted, SIZE, BLOCK * SIZE, 1.0, scale,
                    SIZE - ROTARY, REST, STORAGE,
                )  # fmt: skip
        else:
            source += (HEADS + KV_HEADS) * SIZE
            if STORAGE != PLAIN:
                scale = tl.load(scales + KV_HEADS + heads, mask=wanted, other=1.0)[:, None]
            copy_row(source, v_pool + offset, heads, wanted, SIZE, BLOCK * SIZE, 1.0, scale, SIZE, TILE, STORAGE)


@triton.jit
def write_latent(
    q, absorbed, content, compressed, cos, sin, positions, slots, unpad, tables, scales, query, pool,
    rows, queries, width, factor,
    HEADS: tl.constexpr, Q_SIZE: tl.constexpr, Q_SKIP: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, TAKE: tl.constexpr,
    STORAGE: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS * Q_SIZE], absorbed [HEADS, T, RANK], content [T, RANK], compressed [T, RANK + ROTARY].
    See RopePagedLatent."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    width_out: tl.constexpr = RANK + ROTARY
    wide_row = row.to(tl.int64)
    c, s = load_turns(cos, sin, positions, row, ROTARY, HALF)
    if group < (HEADS + TAKE - 1) // TAKE:
        heads = group * TAKE + tl.arange(0, TAKE)
        wanted = heads < HEADS
        target = query + wide_row * (HEADS * width_out)
        far = rows.to(tl.int64) * RANK  # from one head to the next
        copy_row(
            absorbed + wide_row * RANK, target, heads.to(tl.int64), wanted, far, width_out, factor, 1.0,
            RANK, TILE, PLAIN,
        )  # fmt: skip
        source = q + wide_row * (HEADS * Q_SIZE) + Q_SKIP
        rotate_row(
            source, target + RANK, heads, wanted, Q_SIZE, width_out, c, s, factor, 1.0, PAIRS, ROTARY, HALF, PLAIN
        )
    else:
        block, place = find_place(slots, unpad, tables, row, queries, width, BLOCK)
        entry = pool + (block * BLOCK + place) * width_out
        head = tl.arange(0, 1)
        one = head < 1
        content_scale, key_scale = 1.0, 1.0
        if STORAGE != PLAIN:
            content_scale, key_scale = tl.load(scales), tl.load(scales + 1)
        copy_row(content + wide_row * RANK, entry, head, one, 0, 0, 1.0, content_scale, RANK, TILE, STORAGE)
        rotate_row(
            compressed + wide_row * width_out + RANK, entry + RANK, head, one, 0, 0, c, s, 1.0, key_scale,
            PAIRS, ROTARY, HALF, STORAGE,
        )  # fmt: skip
