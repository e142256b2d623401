// x [rows, in] times W [in, out] in INT4 or INT8 with one float scale per group of inputs and output.
//
// Products are of integers: 128 inputs of a row at a time become 16 bits each, in units of a power of two, which is
// exact for bf16 down to 1/128 of the largest of them and off by 2^-15 of it at most. Sums of 128 are exact in 32 bits;
// they are added up in fp32, and a group's sum is multiplied by its scale once.
//
// INT4: for every 16 outputs and 8 inputs 64 bytes, 16 words of 32 bits. Of word n, bits 4s + 16p and up are the weight
// of output n and input 2s + p, plus 8. INT8: for every 16 outputs and 4 inputs 64 bytes; of word n, byte s + 2p is the
// weight of output n and input 2s + p.
#include <math.h>

#include "vectors.h"

#include "calls.h"

enum {
    PART = 128,            // inputs that share a unit
    VECTORS = 16 / LANES,  // of 16 outputs
    TILE = 8 / VECTORS,    // rows that are multiplied by a weight while it is in a register: their sums are in some, too
    NEAR = 16,             // blocks of 16 outputs whose weights stay in the cache while all rows pass
    SHARES = 8,            // of each thread, at least
    AHEAD = 4096,          // bytes: weights are read once, from memory
};

typedef struct {
    long rows, in, out, length;  // length: of a group
} shape;

// `count` rows in integers, a pair of inputs of all rows next to each other.
typedef struct {
    int32_t *pairs;    // [in / 2, count]
    float *units;      // [parts, count]
    int32_t *offsets;  // [parts, count]: what the 8 added to each INT4 weight adds to a sum, taken off
} tile;

INLINE long end_of_part(long first, long end) { return first + PART < end ? first + PART : end; }

INLINE void write_tile(const int bf16, const void *x, long count, shape s, tile to) {
    for (long m = 0; m < count; m++) {
        long part = m;
        for (long group = 0; group < s.in; group += s.length)
            for (long first = group; first < group + s.length; first += PART, part += count) {
                const long inputs = end_of_part(first, group + s.length) - first, from = m * s.in + first;
                float most = 0, invalid = 0;
#pragma omp simd reduction(max : most) reduction(+ : invalid)
                for (long k = 0; k < inputs; k++) {
                    const float value = get(bf16, x, from + k);
                    most = fabsf(value) > most ? fabsf(value) : most;
                    invalid += value * 0.0f;  // NaN where a value is, or is infinite
                }
                // most < 2^(exponent - 126): in units of 2^(exponent - 141) it fits 16 bits.
                const int exponent = (int)(bits_of(most) >> 23);
                const int counts = exponent > 16 && invalid == 0;  // else nothing, or NaN
                const float inverse = counts ? power_of_two(141 - exponent) : 0;
                int16_t integers[PART];
                int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long k = 0; k < inputs; k++) {
                    const float steps = rintf(counts ? get(bf16, x, from + k) * inverse : 0);
                    const int32_t value = steps < 32767 ? (int32_t)steps : 32767;
                    integers[k] = (int16_t)value;
                    sum += value;
                }
                for (long k = 0; k < inputs; k += 2)
                    memcpy(to.pairs + (first + k) / 2 * count + m, integers + k, sizeof *to.pairs);
                to.units[part] = counts ? power_of_two(exponent - 141) : invalid;
                to.offsets[part] = -8 * sum;
            }
    }
}

// LANES pairs of weights of inputs 2s and 2s + 1 of those that share the words.
INLINE ints pair_of_weights(const int bits, ints words, int s) {
    if (bits == 4) return (words >> 4 * s) & 0x000f000f;
    return (ints)(s ? (shorts)words >> 8 : (shorts)words << 8 >> 8);
}

// `count` rows, 16 outputs: `sums` [count, 16].
INLINE void multiply_rows(const int bits, const int count, tile x, shape s, const uint8_t *weights, const float *scales,
                          float *sums) {
    floats total[TILE][VECTORS];
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++) total[m][v] = (floats){0};
    for (long group = 0; group < s.in; group += s.length, scales += 16) {
        floats scaled[TILE][VECTORS];
        for (int m = 0; m < count; m++)
            for (int v = 0; v < VECTORS; v++) scaled[m][v] = (floats){0};
        for (long first = group; first < group + s.length; first += PART, x.units += count, x.offsets += count) {
            ints sum[TILE][VECTORS];
            for (int m = 0; m < count; m++)
                for (int v = 0; v < VECTORS; v++) sum[m][v] = (ints){0} + (bits == 4 ? x.offsets[m] : 0);
            for (long k = first; k < end_of_part(first, group + s.length); k += 32 / bits) {
                ints words[VECTORS];
                for (int v = 0; v < VECTORS; v++) words[v] = load_ints(weights + 2 * bits * k + 4 * LANES * v);
                __builtin_prefetch(weights + 2 * bits * k + AHEAD);
#pragma GCC unroll 4
                for (int i = 0; i < 16 / bits; i++)
                    for (int v = 0; v < VECTORS; v++) {
                        const ints pair = pair_of_weights(bits, words[v], i);
                        for (int m = 0; m < count; m++)
                            sum[m][v] = add_pairs(sum[m][v], pair, (ints){0} + x.pairs[(k / 2 + i) * count + m]);
                    }
            }
            for (int m = 0; m < count; m++)
                for (int v = 0; v < VECTORS; v++) scaled[m][v] += widen(sum[m][v]) * x.units[m];
        }
        for (int v = 0; v < VECTORS; v++)
            for (int m = 0; m < count; m++) total[m][v] += scaled[m][v] * load_floats(scales + LANES * v);
    }
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++) store_floats(sums + 16 * m + LANES * v, total[m][v]);
}

INLINE void multiply(const int bits, int count, tile x, shape s, const uint8_t *weights, const float *scales,
                     float *sums) {
    switch (count) {
#define CASE(n)                                              \
    case n:                                                  \
        multiply_rows(bits, n, x, s, weights, scales, sums); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

// The tile of rows from `row` on, in the memory that holds all of them.
INLINE tile tile_at(long row, int32_t *scratch, long parts, shape s) {
    const tile all = {scratch, (float *)(scratch + s.rows * s.in / 2), scratch + s.rows * (s.in / 2 + parts)};
    return (tile){all.pairs + row * s.in / 2, all.units + row * parts, all.offsets + row * parts};
}

// x and y [rows, out]: bf16 or float. bits: 4 or 8. out: a multiple of 16; in / groups: of 8. `scratch`: rows * (in / 2 +
// 2 * parts) integers, parts those of all groups.
typedef struct {
    int64_t bits, bf16_x;
    const void *x;
    const uint8_t *weights;
    const float *scales;
    int64_t bf16_y;
    void *y;
    int64_t rows, in, out, groups;
} linear_arguments;

INLINE void linear_shared(const int bits, const linear_arguments *a, int32_t *scratch, team all) {
    const shape s = {a->rows, a->in, a->out, a->in / a->groups};
    const long parts = a->groups * ((s.length + PART - 1) / PART), blocks = s.out / 16;
    for (long row = TILE * all.me; row < s.rows; row += TILE * all.count) {
        const long count = s.rows - row < TILE ? s.rows - row : TILE;
        if (a->bf16_x)
            write_tile(1, (const uint16_t *)a->x + row * s.in, count, s, tile_at(row, scratch, parts, s));
        else
            write_tile(0, (const float *)a->x + row * s.in, count, s, tile_at(row, scratch, parts, s));
    }
    if (all.me == 0) atomic_store(&all.place->next, 0);
    wait_for_all(all);
    // Who comes first takes the next blocks: another thread may have to be woken, which takes as long as many of them.
    const long share = blocks / (SHARES * all.count), near = share < 1 ? 1 : share < NEAR ? share : NEAR;
    for (long first; (first = near * atomic_fetch_add(&all.place->next, 1)) < blocks;)
        for (long row = 0; row < s.rows; row += TILE)
            for (long n = first; n < blocks && n < first + near; n++) {
                const int count = s.rows - row < TILE ? (int)(s.rows - row) : TILE;
                const tile rows = tile_at(row, scratch, parts, s);
                float sums[TILE * 16];
                multiply(bits, count, rows, s, a->weights + n * s.in * 2 * bits, a->scales + n * a->groups * 16, sums);
                for (int m = 0; m < count; m++)
                    for (int i = 0; i < 16; i++) put(a->bf16_y, a->y, (row + m) * s.out + 16 * n + i, sums[16 * m + i]);
            }
}

int linear(const void *arguments, void *scratch, team all) {
    const linear_arguments *a = arguments;
    if (a->bits == 4)
        linear_shared(4, a, scratch, all);
    else
        linear_shared(8, a, scratch, all);
    return 0;
}
