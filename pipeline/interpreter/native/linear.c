// x [rows, in] times W [in, out] in INT4 or INT8 with one float scale per group of inputs and output.
//
// Products are of integers: 128 inputs of a row at a time become 16 bits each, in units of a power of two, which is
// exact for bf16 down to 1/128 of the largest of them and off by 2^-15 of it at most. Sums of 128 are exact in 32 bits;
// they are added up in fp32, and a group's sum is multiplied by its scale once. Or 32 inputs at a time become 8 bits, a
// register of which holds twice as many: in units of 1/127 of the largest of them, off by 1/254 of it at most.
//
// INT4: for every 16 outputs and 8 inputs 64 bytes, 16 words of 32 bits. Of word n, bits 4s + 16p and up are the weight
// of output n and input 2s + p, plus 8. INT8: for every 16 outputs and 4 inputs 64 bytes; of word n, byte s + 2p is the
// weight of output n and input 2s + p.
#include <math.h>

#include "vectors.h"

#include "calls.h"

#include "linear.h"

enum {
    PART = 128,            // inputs that share a unit
    SHORT_PART = 32,       // … in 8 bits: their sums by INT4 weights fit 16 bits
    VECTORS = 16 / LANES,  // of 16 outputs
    TILE = 8 / VECTORS,    // rows that are multiplied by a weight while it is in a register: their sums are in some, too
    NEAR = 16,             // blocks of 16 outputs whose weights stay in the cache while all rows pass
    AHEAD = 4096,          // bytes: weights are read once, from memory
};
#define BITS_OF_INFINITY 0x7f800000
#define SMALLEST 0x1p-110f  // of which a unit and its inverse are ordinary numbers; what is smaller counts as nothing

// bits, input_bits: of a weight (4 or 8) and an input (16, or 8 by INT4 weights), constants wherever they are used.
// length: of a group.
typedef struct {
    int bits, input_bits;
    long rows, in, out, length;
} shape;

// `count` rows in integers, those of 32 bits of all rows next to each other. offsets: what the 8 added to each INT4
// weight adds to a sum, taken off: of 16 bits from a part's, of 8 from a group's, which spares each part an addition.
typedef struct {
    int32_t *integers;     // [in * input_bits / 32, count]
    float *units;          // [parts, count]
    int32_t *offsets;      // [parts, count]
    float *group_offsets;  // [groups, count]
} tile;

INLINE long part_of(shape s) { return s.input_bits == 16 ? PART : SHORT_PART; }

// Groups of INT4 are whole parts of 8 bits: so many inputs that the compiler needs no loop.
INLINE long end_of_part(long first, long end, shape s) {
    return s.input_bits == 8 || first + PART < end ? first + part_of(s) : end;
}

// Where the largest of what shares a unit is `most`: the unit, and its inverse.
typedef struct {
    float unit, inverse;
} scaling;

INLINE scaling scale_to(const int bits, float most) {
    if (bits == 8) return (scaling){most / 127, 127 / most};
    // most < 2^(exponent - 126): in units of 2^(exponent - 141) it fits 16 bits.
    const int exponent = (int)(bits_of(most) >> 23);
    return (scaling){power_of_two(exponent - 141), power_of_two(141 - exponent)};
}

// `inputs` integers of a part as the products take them. In 8 bits parts are whole, and of 8 inputs those come first that
// the lower halves of bytes of weights belong to.
INLINE void write_integers(const int bits, const int16_t *integers, long inputs, int32_t *to, long count) {
    if (bits == 16) {
        for (long k = 0; k < inputs; k += 2) memcpy(to + k / 2 * count, integers + k, sizeof *to);
        return;
    }
    for (long k = 0; k < inputs; k += 8) {
        const uint64_t low_bytes = 0x00ff00ff00ff00ff;
        uint64_t first, second;
        memcpy(&first, integers + k, sizeof first);
        memcpy(&second, integers + k + 4, sizeof second);
        const uint64_t mixed = (first & low_bytes) | (second & low_bytes) << 8;
        to[k / 4 * count] = (int32_t)mixed;
        to[(k / 4 + 1) * count] = (int32_t)(mixed >> 32);
    }
}

INLINE void write_tile(const int bf16, const void *x, long count, shape s, tile to) {
    for (long m = 0; m < count; m++) {
        long part = m;
        for (long group = 0; group < s.in; group += s.length) {
            float group_offset = 0;
            for (long first = group; first < group + s.length; first += part_of(s), part += count) {
                const long inputs = end_of_part(first, group + s.length, s) - first, from = m * s.in + first;
                int32_t bits = 0;  // of the largest: values and what is not finite are ordered as their bits
#pragma omp simd reduction(max : bits)
                for (long k = 0; k < inputs; k++) {
                    const int32_t value = (int32_t)(bits_of(get(bf16, x, from + k)) & 0x7fffffff);
                    bits = value > bits ? value : bits;
                }
                const float most = of_bits((uint32_t)bits), nothing = bits < BITS_OF_INFINITY ? 0 : NAN;
                const int counts = most >= SMALLEST && bits < BITS_OF_INFINITY;
                const scaling by = counts ? scale_to(s.input_bits, most) : (scaling){nothing, 0};
                const float largest = (1 << (s.input_bits - 1)) - 1;
                int16_t integers[PART];
                int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long k = 0; k < inputs; k++) {
                    const float steps = rintf(get(bf16, x, from + k) * by.inverse);
                    const int32_t integer = (int32_t)(steps < largest ? steps : largest);  // of NaN too a number
                    integers[k] = (int16_t)integer;
                    sum += integer;
                }
                int32_t *at = to.integers + first * s.input_bits / 32 * count + m;
                write_integers(s.input_bits, integers, inputs, at, count);
                to.units[part] = by.unit;
                if (s.input_bits == 16) to.offsets[part] = -8 * sum;
                group_offset += -8 * by.unit * (float)sum;
            }
            to.group_offsets[group / s.length * count + m] = group_offset;
        }
    }
}

// Of words that hold weights of several inputs those of the `i`th inputs, as many as one integer of a row holds.
INLINE ints pick_weights(shape s, ints words, int i) {
    if (s.input_bits == 8) return (words >> 4 * i) & 0x0f0f0f0f;
    if (s.bits == 4) return (words >> 4 * i) & 0x000f000f;
    return (ints)(i ? (shorts)words >> 8 : (shorts)words << 8 >> 8);
}

INLINE ints add_products(shape s, ints sum, ints weights, int32_t inputs) {
    const ints row = (ints){0} + inputs;
    return s.input_bits == 8 ? (ints)add_pairs_of_bytes((shorts)sum, weights, row) : add_pairs(sum, weights, row);
}

// The sums of inputs [first, end) by 16 outputs' weights: `from` are of `count` rows.
INLINE void add_part(const int count, tile from, shape s, const uint8_t *weights, long first, long end,
                     ints sum[TILE][VECTORS]) {
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++)
            sum[m][v] = (ints){0} + (s.bits == 4 && s.input_bits == 16 ? from.offsets[m] : 0);
#pragma GCC unroll 4
    for (long k = first; k < end; k += 32 / s.bits) {
        ints words[VECTORS];
        for (int v = 0; v < VECTORS; v++) words[v] = load_ints(weights + 2 * s.bits * k + 4 * LANES * v);
        if (s.input_bits == 16) __builtin_prefetch(weights + 2 * s.bits * k + AHEAD);
        const int32_t *inputs = from.integers + k / (32 / s.input_bits) * count;
#pragma GCC unroll 4
        for (int i = 0; i < s.input_bits / s.bits; i++) {
            ints some[VECTORS];
            for (int v = 0; v < VECTORS; v++) some[v] = pick_weights(s, words[v], i);
            for (int m = 0; m < count; m++)
                for (int v = 0; v < VECTORS; v++)
                    sum[m][v] = add_products(s, sum[m][v], some[v], inputs[i * count + m]);
        }
    }
    if (s.input_bits == 8)
        for (int m = 0; m < count; m++)
            for (int v = 0; v < VECTORS; v++) sum[m][v] = add_pairs((ints){0}, sum[m][v], (ints){0} + 0x00010001);
}

// `count` rows, 16 outputs: `sums` [count, 16].
INLINE void multiply_rows(const int count, tile x, shape s, const uint8_t *weights, const float *scales, float *sums) {
    floats total[TILE][VECTORS];
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++) total[m][v] = (floats){0};
    for (long group = 0; group < s.in; group += s.length, scales += 16, x.group_offsets += count) {
        floats scaled[TILE][VECTORS];
        for (int m = 0; m < count; m++)
            for (int v = 0; v < VECTORS; v++) scaled[m][v] = (floats){0} + (s.input_bits == 8 ? x.group_offsets[m] : 0);
        for (long first = group; first < group + s.length; first += part_of(s), x.units += count, x.offsets += count) {
            ints sum[TILE][VECTORS];
            add_part(count, x, s, weights, first, end_of_part(first, group + s.length, s), sum);
            for (int m = 0; m < count; m++)
                for (int v = 0; v < VECTORS; v++) scaled[m][v] += widen(sum[m][v]) * x.units[m];
        }
        for (int v = 0; v < VECTORS; v++)
            for (int m = 0; m < count; m++) total[m][v] += scaled[m][v] * load_floats(scales + LANES * v);
    }
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++) store_floats(sums + 16 * m + LANES * v, total[m][v]);
}

INLINE void multiply(int count, tile x, shape s, const uint8_t *weights, const float *scales, float *sums) {
    switch (count) {
#define CASE(n)                                        \
    case n:                                            \
        multiply_rows(n, x, s, weights, scales, sums); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

INLINE void put_sums(const int bf16, void *y, long place, const float *sums) {
    for (int i = 0; i < 16; i++) put(bf16, y, place + i, sums[i]);
}

// The tile of rows from `row` on, in the memory that holds all of them.
INLINE tile tile_at(long row, int32_t *scratch, long parts, shape s) {
    const long words = s.in * s.input_bits / 32;
    float *units = (float *)(scratch + s.rows * words), *groups = units + 2 * s.rows * parts;
    int32_t *offsets = (int32_t *)(units + s.rows * parts);
    return (tile){scratch + row * words, units + row * parts, offsets + row * parts, groups + row * (s.in / s.length)};
}

INLINE void linear_shared(const int bits, const int input_bits, const linear_arguments *a, int32_t *scratch, team all) {
    const shape s = {bits, input_bits, a->rows, a->in, a->out, a->in / a->groups};
    const long parts = a->groups * ((s.length + part_of(s) - 1) / part_of(s)), blocks = s.out / 16;
    for (long row = TILE * all.me; row < s.rows; row += TILE * all.count) {
        const long count = s.rows - row < TILE ? s.rows - row : TILE;
        if (a->bf16_x)
            write_tile(1, (const uint16_t *)a->x + row * s.in, count, s, tile_at(row, scratch, parts, s));
        else
            write_tile(0, (const float *)a->x + row * s.in, count, s, tile_at(row, scratch, parts, s));
    }
    open_shares(all);
    const long near = size_share(blocks, NEAR, all);
    for (long first; (first = take_share(near, all)) < blocks;)
        for (long row = 0; row < s.rows; row += TILE)
            for (long n = first; n < blocks && n < first + near; n++) {
                const int count = s.rows - row < TILE ? (int)(s.rows - row) : TILE;
                const tile rows = tile_at(row, scratch, parts, s);
                float sums[TILE * 16];
                multiply(count, rows, s, a->weights + n * s.in * 2 * bits, a->scales + n * a->groups * 16, sums);
                for (int m = 0; m < count; m++)
                    if (a->bf16_y)
                        put_sums(1, a->y, (row + m) * s.out + 16 * n, sums + 16 * m);
                    else
                        put_sums(0, a->y, (row + m) * s.out + 16 * n, sums + 16 * m);
            }
}

int linear(const void *arguments, void *scratch, team all) {
    const linear_arguments *a = arguments;
    if (a->bits == 8)
        linear_shared(8, 16, a, scratch, all);
    else if (a->input_bits == 16)
        linear_shared(4, 16, a, scratch, all);
    else
        linear_shared(4, 8, a, scratch, all);
    return 0;
}
