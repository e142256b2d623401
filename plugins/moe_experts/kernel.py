# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Routed experts as grouped matrix products: `group_pairs` → `multiply` (gated) → `multiply` → `combine`.

A pair is one (row, place among its top k). The pairs are put in order by expert, and each product's program does one
block of columns of one expert, over tiles of that expert's pairs: experts without pairs cost programs that end at once,
and nobody waits for the host to learn how many there are. Nothing is added in an order that could change: no atomics.
"""

import triton
import triton.language as tl

# How weights are stored.
PLAIN, FP8, FP8_BLOCKS, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # by group from 2 on
BLOCK = tl.constexpr(128)  # of FP8 blocks, in both directions
# Numbers of 1.5 * 2**14 are 2**-9 apart: adding and taking it away rounds to E4M3's subnormals, ties to even.
ROUND = tl.constexpr(24576.0)
SMALLEST_NORMAL = tl.constexpr(0.015625)  # of E4M3


@triton.jit
def group_pairs(
    indices, starts, order, pairs,
    FIRST: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program e: where the pairs of expert FIRST + e begin in `order`, and which they are, in their own order. Every
    program reads all indices, so that none waits for another."""
    expert = FIRST + tl.program_id(0)
    offset = tl.arange(0, TILE)
    place = 0
    own = 0
    for at in range(0, pairs, TILE):
        chosen = tl.load(indices + at + offset, mask=at + offset < pairs, other=-1)
        place += tl.sum(((chosen >= FIRST) & (chosen < expert)).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(starts + tl.program_id(0), place)
    if tl.program_id(0) == COUNT - 1:
        tl.store(starts + COUNT, place + own)
    for at in range(0, pairs, TILE):
        chosen = tl.load(indices + at + offset, mask=at + offset < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - mine, at + offset, mask=mine != 0)
        place += tl.sum(mine, 0)


@triton.jit
def round_to_e4m3(x):
    """fp32 → the nearest number that E4M3 has, still in fp32: its cast is then exact, and SM80 needs none."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, (x + ROUND) - ROUND, bits.to(tl.float32, bitcast=True))


@triton.jit
def load_inputs(
    source, rows, wanted, at, step,
    INNER: tl.constexpr, DEPTH: tl.constexpr, STEPPED: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """[ROWS, DEPTH] of the rows' columns from `at` on; STEPPED: in steps, as FP8 from SM89 on."""
    inner = at + tl.arange(0, DEPTH)
    mask = wanted[:, None]
    if INNER % DEPTH != 0:
        mask = mask & (inner < INNER)[None, :]
    x = tl.load(source + rows[:, None] * INNER + inner[None, :], mask=mask, other=0.0)
    if STEPPED:
        rounded = round_to_e4m3(tl.div_rn(x.to(tl.float32), step))
        return rounded.to(tl.float8e4nv if SM >= 89 else x.dtype)
    else:
        return x


@triton.jit
def load_weights(
    stack, block, at, kind: tl.constexpr,
    OUT: tl.constexpr, STRIDE: tl.constexpr, STORAGE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, DEPTH] of one expert's [out, in], as `kind`. Both nibbles of a byte are of one input: two columns."""
    inner = at + tl.arange(0, DEPTH)
    lanes: tl.constexpr = 2 if STORAGE == INT4 else 1
    column = block * (COLUMNS // lanes) + tl.arange(0, COLUMNS // lanes)
    mask = (column < OUT // lanes)[:, None]
    if STRIDE % DEPTH != 0:
        mask = mask & (inner < STRIDE)[None, :]
    stored = tl.load(stack + column[:, None] * STRIDE + inner[None, :], mask=mask, other=0)
    if STORAGE == INT4:
        # 1024 to 1039 in fp16 are 0x6400 to 0x640F; the nibble's sign bit turned, -8 to 7 are 0 to 15.
        wide = stored.to(tl.int16)
        pairs = tl.permute(tl.join(wide & 15, (wide >> 4) & 15), (0, 2, 1))
        lifted = (tl.reshape(pairs, [COLUMNS, DEPTH]) ^ 8) | 0x6400
        return (lifted.to(tl.float16, bitcast=True) - 1032.0).to(kind)
    elif STORAGE == PLAIN:
        return stored
    elif kind == tl.float8e4nv:
        return stored.to(tl.float8e4nv, bitcast=True)
    else:
        # E4M3's bits in fp16's places are 2**-8 of it, subnormals included.
        wide = stored.to(tl.int16)
        return (((wide & -32768) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0).to(kind)


@triton.jit
def add_products(
    sums, x, stack, scales, block, at,
    OUT: tl.constexpr, STRIDE: tl.constexpr, STORAGE: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """sums + x wᵀ in fp32, where the scale of each group of inputs multiplies the group's sums."""
    w = tl.trans(load_weights(stack, block, at, x.dtype, OUT, STRIDE, STORAGE, COLUMNS, DEPTH))
    if STORAGE < FP8_BLOCKS:
        return tl.dot(x, w, sums, input_precision="ieee", max_num_imprecise_acc=0)
    else:
        part = tl.dot(x, w, input_precision="ieee")
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        place = (column // BLOCK) * (STRIDE // BLOCK) + at // BLOCK
        if STORAGE == INT4:
            place = (at // GROUP) * OUT + column
        return sums + part * tl.load(scales + place, mask=column < OUT, other=0.0).to(tl.float32)[None, :]


@triton.jit
def multiply(
    source, order, starts, left, left_scales, right, right_scales, prescale, target, step,
    GATED: tl.constexpr, TOP_K: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, STRIDE: tl.constexpr,
    STACK: tl.constexpr, SCALES: tl.constexpr, STORAGE: tl.constexpr, GROUP: tl.constexpr, STEPPED: tl.constexpr,
    PRESCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """GATED: rows of x, silu(left) * right into the place of each pair in `order`. Else: rows in that order, left into
    each pair's own row. STACK, SCALES: elements of one expert's. See operation.py."""
    block = tl.program_id(0)
    expert = tl.program_id(1)
    first = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - first
    left += expert.to(tl.int64) * STACK
    if STORAGE != PLAIN:
        left_scales += expert * SCALES
    if GATED:
        right += expert.to(tl.int64) * STACK
        if STORAGE != PLAIN:
            right_scales += expert * SCALES
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(2) * ROWS, count, tl.num_programs(2) * ROWS):
        member = tile + tl.arange(0, ROWS)
        wanted = member < count
        pair = tl.load(order + first + member, mask=wanted, other=0)
        if GATED:
            rows = (pair // TOP_K).to(tl.int64)
            places = (first + member).to(tl.int64)
        else:
            rows = (first + member).to(tl.int64)
            places = pair.to(tl.int64)
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        linear = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, INNER, DEPTH):
            x = load_inputs(source, rows, wanted, at, step, INNER, DEPTH, STEPPED, SM)
            result = add_products(
                result, x, left, left_scales, block, at, OUT, STRIDE, STORAGE, GROUP, COLUMNS, DEPTH
            )  # fmt: skip
            if GATED:
                linear = add_products(
                    linear, x, right, right_scales, block, at, OUT, STRIDE, STORAGE, GROUP, COLUMNS, DEPTH
                )  # fmt: skip
        if STORAGE == FP8:
            factor = step if STEPPED else 1.0
            result = result * (tl.load(left_scales) * factor)
            if GATED:
                linear = linear * (tl.load(right_scales) * factor)
        if GATED:
            result = result * tl.sigmoid(result) * linear
        if PRESCALE != 0:
            own = prescale + column + (expert * OUT if PRESCALE == 2 else 0)
            result = result * tl.load(own, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
        tl.store(
            target + places[:, None] * OUT + column[None, :],
            result.to(target.dtype.element_ty),
            mask=wanted[:, None] & (column < OUT)[None, :],
        )


@triton.jit
def combine(
    parts, weights, indices, output,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each row's pairs, times their weights, added in order in fp32; what is not of these experts was never made."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        chosen = tl.load(indices + pair)
        here = (chosen >= FIRST) & (chosen < FIRST + COUNT)
        part = tl.load(parts + pair * HIDDEN + column, mask=here & (column < HIDDEN), other=0.0)
        sums += part.to(tl.float32) * tl.load(weights + pair)
    tl.store(output + row * HIDDEN + column, sums, mask=column < HIDDEN)
