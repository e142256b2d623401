# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sorts tokens by the ranks of their experts, packs and unpacks messages, and sums up what comes back.

Order is by token everywhere, without atomics: the same bits at every run. FP8 (E4M3) is encoded and decoded with
integers, so that SM80, which has no such type, sends and reads it as the others do.
"""

import triton
import triton.language as tl

WIDEST, SMALLEST = tl.constexpr(448.0), tl.constexpr(1e-30)  # message.py's
# Bits of fp32: 2**-6, E4M3's smallest normal number; 2**14, whose last digit is E4M3's smallest; rounding to 3 digits.
NORMAL, STEP, HALF = tl.constexpr(0x3C800000), tl.constexpr(0x46800000), tl.constexpr(0x7FFFF)
BIAS = tl.constexpr((127 - 7) << 3)


@triton.jit
def encode_fp8(x):
    """fp32 of at most 448 → E4M3's bits, rounded to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + HALF + ((size >> 20) & 1)) >> 20) - BIAS
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - STEP
    code = tl.where(size < NORMAL, small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.int8)


@triton.jit
def decode_fp8(code):
    """E4M3's bits → fp32. With its digits where fp16 has them, a number is 2**8 times too small."""
    wide = code.to(tl.int32)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def rank_tokens(
    ids, places, counts, tokens,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, LOCAL: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program for each rank: which tokens go there, and as the how manieth. A token's place stands at the first of
    its experts on that rank, -1 at the others. Experts out of range go nowhere."""
    rank = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    total = 0
    for start in range(0, tokens, TILE):
        row = start + tl.arange(0, TILE)
        held = (row < tokens)[:, None] & (column < TOP_K)[None, :]
        at = row[:, None] * TOP_K + column[None, :]
        expert = tl.load(ids + at, mask=held, other=-1)
        valid = (expert >= 0) & (expert < EXPERTS)
        here = valid & (expert // LOCAL == rank)
        first = tl.min(tl.where(here, column[None, :], COLUMNS), axis=1)
        goes = (first < COLUMNS).to(tl.int32)
        place = total + tl.cumsum(goes, 0) - goes
        nowhere = held & (valid == 0) & (rank == 0)
        tl.store(places + at, tl.where(column[None, :] == first[:, None], place[:, None], -1), mask=here | nowhere)
        total += tl.sum(goes, 0)
    tl.store(counts + rank, total)


@triton.jit
def pack(
    x, ids, weights, within, counts, words, rows, places,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, LOCAL: tl.constexpr,
    RANKS: tl.constexpr, RANK_TILE: tl.constexpr, FP8: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr,
    EXPERTS_AT: tl.constexpr, WEIGHTS_AT: tl.constexpr,
):  # fmt: skip
    """One program for each token: reads its row once, writes it for every rank it goes to. `words` and `rows` are the
    messages as int32 and as elements of a row. → places: rows of `messages`, instead of places within a rank's."""
    token = tl.program_id(0)
    column = tl.arange(0, TILE)
    inside = column < HIDDEN
    row = tl.load(x + token.to(tl.int64) * HIDDEN + column, mask=inside, other=0.0)
    if FP8:
        wide = row.to(tl.float32)
        widest = tl.maximum(tl.max(tl.abs(wide), axis=0), SMALLEST)
        scale = tl.div_rn(widest, WIDEST)
        bounded = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -WIDEST), WIDEST)
        sent = encode_fp8(bounded)
    else:
        sent = row
    choice = tl.arange(0, COLUMNS)
    chosen = choice < TOP_K
    experts = tl.load(ids + token * TOP_K + choice, mask=chosen, other=-1)
    shares = tl.load(weights + token * TOP_K + choice, mask=chosen, other=0.0).to(tl.int32, bitcast=True)
    rank = tl.arange(0, RANK_TILE)
    sizes = tl.load(counts + rank, mask=rank < RANKS, other=0)
    for number in range(TOP_K):
        place = tl.load(within + token * TOP_K + number)
        if place >= 0:
            to = tl.load(ids + token * TOP_K + number) // LOCAL
            message = (place + tl.sum(tl.where(rank < to, sizes, 0), 0)).to(tl.int64)
            tl.store(rows + message * STRIDE + column, sent, mask=inside)
            if FP8:
                tl.store(words + message * WORDS + EXPERTS_AT - 1, scale.to(tl.int32, bitcast=True))
            tl.store(words + message * WORDS + EXPERTS_AT + choice, experts, mask=chosen)
            tl.store(words + message * WORDS + WEIGHTS_AT + choice, shares, mask=chosen)
            tl.store(places + token * TOP_K + number, message.to(tl.int32))
        else:
            tl.store(places + token * TOP_K + number, -1)


@triton.jit
def unpack(
    words, rows, counts, x, ids, weights,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
    RANK_TILE: tl.constexpr, FP8: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr, EXPERTS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
):  # fmt: skip
    """One program for each row that there is room for. `counts` are of what came. Rows that did not come get experts
    -1, and stay as they are."""
    message = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANK_TILE)
    total = tl.sum(tl.load(counts + RANKS + rank, mask=rank < RANKS, other=0), 0)
    choice = tl.arange(0, COLUMNS)
    chosen = choice < TOP_K
    if message < total:
        column = tl.arange(0, TILE)
        inside = column < HIDDEN
        row = tl.load(rows + message * STRIDE + column, mask=inside, other=0)
        if FP8:
            scale = tl.load(words + message * WORDS + EXPERTS_AT - 1).to(tl.float32, bitcast=True)
            tl.store(x + message * HIDDEN + column, (decode_fp8(row) * scale).to(x.dtype.element_ty), mask=inside)
        else:
            tl.store(x + message * HIDDEN + column, row, mask=inside)
        experts = tl.load(words + message * WORDS + EXPERTS_AT + choice, mask=chosen)
        shares = tl.load(words + message * WORDS + WEIGHTS_AT + choice, mask=chosen).to(tl.float32, bitcast=True)
        tl.store(ids + message * TOP_K + choice, experts, mask=chosen)
        tl.store(weights + message * TOP_K + choice, shares, mask=chosen)
    else:
        tl.store(ids + message * TOP_K + choice, tl.full([COLUMNS], -1, tl.int32), mask=chosen)
        tl.store(weights + message * TOP_K + choice, tl.zeros([COLUMNS], tl.float32), mask=chosen)


@triton.jit
def combine(returned, places, output, HIDDEN: tl.constexpr, TILE: tl.constexpr, TOP_K: tl.constexpr):
    """One program for some columns of a token: the sum of what its ranks returned, in fp32, in order of its experts."""
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < HIDDEN
    total = tl.zeros([TILE], tl.float32)
    for number in range(TOP_K):
        place = tl.load(places + token * TOP_K + number)
        if place >= 0:
            row = tl.load(returned + place.to(tl.int64) * HIDDEN + column, mask=inside, other=0.0)
            total += row.to(tl.float32)
    tl.store(output + token.to(tl.int64) * HIDDEN + column, total.to(output.dtype.element_ty), mask=inside)
