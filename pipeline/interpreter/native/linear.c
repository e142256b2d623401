// x [rows, in] times W [in, out] in INT4 or INT8 with one float scale per group of inputs and output.
//
// INT4: for every 16 outputs and 8 inputs 64 bytes, 16 words of 32 bits. Of word n, bits 4s + 16p and up are the weight
// of output n and input 2s + p, plus 8. INT8: for every 16 outputs and T inputs 16T bytes, T = 2 with bf16 products and 4
// without. Byte Tn + p is the weight of output n and input p.
//
// Weights are exact in the type that they are multiplied in; products are added in fp32, and a group's sum is
// multiplied by its scale once. `chains`: independent sums per row (1, 2 or 4), so that few rows do not wait for the
// latency of each addition.
#include "vectors.h"

#ifdef BF16_PRODUCTS  // x is bf16, and two inputs are multiplied and added at once
typedef uint16_t input;
const int takes_bf16 = 1;

// vpermw looks up 32 nibbles at a time: its indices are the lowest 5 bits of each 16, and the table is the same in both
// halves, so that a nibble needs a shift and nothing else. -8 to 7 in bf16:
#define VALUES 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, \
               0x40a0, 0x40c0, 0x40e0
static const uint16_t TABLE[32] = {VALUES, VALUES};

INLINE __m512bh bytes_to_bf16(const uint8_t *bytes) {
    const __m128i *halves = (const __m128i *)bytes;
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

INLINE __m512bh pair(const uint16_t *x) {
    int both;
    memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

INLINE void block(const int bits, const int rows, const int chains, const input *x, long in, const uint8_t *weights,
                  const float *scales, long groups, float *sums) {
    const __m512i table = _mm512_loadu_si512(TABLE);
    __m512 total[8];
    for (int m = 0; m < rows; m++) total[m] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        __m512 part[8][4];
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < chains; c++) part[m][c] = _mm512_setzero_ps();
        for (long k = 0; k < in / groups; k += 8, weights += 16 * bits, x += 8) {
            const __m512i words = _mm512_loadu_si512(weights);
#define PAIR(s)                                                                                                    \
    {                                                                                                              \
        const __m512bh w = bits == 8 ? bytes_to_bf16(weights + 32 * s)                                             \
                                     : (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * s), table); \
        for (int m = 0; m < rows; m++)                                                                             \
            part[m][s % chains] = _mm512_dpbf16_ps(part[m][s % chains], w, pair(x + m * in + 2 * s));              \
    }
            PAIR(0) PAIR(1) PAIR(2) PAIR(3)
        }
        const __m512 scale = _mm512_loadu_ps(scales + 16 * g);
        for (int m = 0; m < rows; m++) {
            __m512 sum = part[m][0];
            for (int c = 1; c < chains; c++) sum = _mm512_add_ps(sum, part[m][c]);
            total[m] = _mm512_fmadd_ps(sum, scale, total[m]);
        }
    }
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(sums + 16 * m, total[m]);
}

#else  // x is fp32, and weights are widened to it: any processor
typedef float input;
const int takes_bf16 = 0;

// LANES weights, times 2^(32 - bits), of input i of those that share the words.
INLINE floats weight(const int bits, ints words, int i) {
    const int first = bits == 4 ? 4 * (i / 2) + 16 * (i % 2) : 8 * i;
    return widen((words << (32 - bits - first)) & (int)(0xffffffff << (32 - bits)));
}

INLINE void part_of_block(const int bits, const int rows, const int chains, const input *x, long in,
                          const uint8_t *weights, const float *scales, long groups, float *sums, int half) {
    const int inputs = 32 / bits;
    const input *row[8];
    floats total[8];
    for (int m = 0; m < rows; m++) row[m] = x + m * in, total[m] = (floats){0};
    for (long g = 0; g < groups; g++) {
        floats part[8][4];
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < chains; c++) part[m][c] = (floats){0};
        for (long k = g * (in / groups); k < (g + 1) * (in / groups); k += inputs) {
            ints words = load_ints(weights + 2 * bits * k + 4 * half);
            if (bits == 4) words ^= (int)0x88888888;  // to two's complement
#pragma GCC unroll 8
            for (int i = 0; i < inputs; i++) {
                const floats w = weight(bits, words, i);
                for (int m = 0; m < rows; m++) part[m][i % chains] += w * row[m][k + i];
            }
        }
        const floats scale = load_floats(scales + 16 * g + half) * (bits == 4 ? 0x1p-28f : 0x1p-24f);
        for (int m = 0; m < rows; m++) {
            floats sum = part[m][0];
            for (int c = 1; c < chains; c++) sum += part[m][c];
            total[m] += sum * scale;
        }
    }
    for (int m = 0; m < rows; m++) store_floats(sums + 16 * m + half, total[m]);
}

INLINE void block(const int bits, const int rows, const int chains, const input *x, long in, const uint8_t *weights,
                  const float *scales, long groups, float *sums) {
    for (int half = 0; half < 16; half += LANES)
        part_of_block(bits, rows, chains, x, in, weights, scales, groups, sums, half);
}
#endif

INLINE void any_block(const int bits, int rows, const input *x, long in, const uint8_t *weights, const float *scales,
                      long groups, float *sums) {
    switch (rows) {
#define CASE(n, chains) case n: block(bits, n, chains, x, in, weights, scales, groups, sums); break;
        CASE(1, 4) CASE(2, 4) CASE(3, 2) CASE(4, 2) CASE(5, 1) CASE(6, 1) CASE(7, 1) CASE(8, 1)
    }
}

INLINE void linear(const int bits, const input *x, const uint8_t *weights, const float *scales, void *y, int wide,
                   long rows, long in, long out, long groups, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < out / 16; n++) {
        for (long first = 0; first < rows; first += 8) {
            const int count = rows - first < 8 ? (int)(rows - first) : 8;
            float sums[8 * 16];
            const uint8_t *column = weights + n * in * 2 * bits;
            if (bits == 4)  // a constant once more: the parallel part is a function of its own
                any_block(4, count, x + first * in, in, column, scales + n * groups * 16, groups, sums);
            else
                any_block(8, count, x + first * in, in, column, scales + n * groups * 16, groups, sums);
            for (int m = 0; m < count; m++)
                for (int i = 0; i < 16; i++) put(!wide, y, (first + m) * out + 16 * n + i, sums[16 * m + i]);
        }
    }
}

// y [rows, out]: bf16, or float where `wide`. out: a multiple of 16; in / groups: of 8.
#define LINEAR(name, bits)                                                                                        \
    void name(const input *x, const uint8_t *weights, const float *scales, void *y, int wide, long rows, long in, \
              long out, long groups, int threads) {                                                               \
        linear(bits, x, weights, scales, y, wide, rows, in, out, groups, threads);                                \
    }
LINEAR(int4_linear, 4)
LINEAR(int8_linear, 8)
