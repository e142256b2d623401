// x [rows, in] bf16 times W [in, out] in INT4 or INT8 with one float scale per group of inputs and output.
//
// INT4: for every 16 outputs and 8 inputs 64 bytes, 32 words of four nibbles. Word 2n + p, nibble s is the weight of
// output n and input 2s + p, plus 8. vpermw looks up 32 of them at a time: its indices are the lowest 5 bits of each
// word, and the table is the same in both halves, so that a nibble needs a shift and nothing else.
// INT8: for every 16 outputs and 2 inputs 32 bytes. Byte 2n + p is the weight of output n and input p, exact in bf16.
// vdpbf16ps then adds the products of two inputs to 16 outputs, in fp32; a group's sum is multiplied by its scale once.
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

INLINE __m512bh look_up(__m512i words, __m512i table) { return (__m512bh)_mm512_permutexvar_epi16(words, table); }

INLINE __m512bh widen(const uint8_t *bytes) {
    const __m128i *halves = (const __m128i *)bytes;
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

INLINE __m512bh pair(const uint32_t *x) { return (__m512bh)_mm512_set1_epi32((int)*x); }

// `chains`: independent sums per row (1, 2 or 4), so that few rows do not wait for the latency of each addition.
INLINE void block(const int bits, const int rows, const int chains, const uint32_t *x, long pairs,
                  const uint8_t *weights, const float *scales, long groups, __m512i table, float *sums) {
    const long steps = pairs / groups / 4;
    __m512 total[8];
    for (int m = 0; m < rows; m++) total[m] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        __m512 part[8][4];
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < chains; c++) part[m][c] = _mm512_setzero_ps();
        for (long k = 0; k < steps; k++, weights += 16 * bits, x += 4) {
            const __m512i words = _mm512_loadu_si512(weights);
#define PAIR(s)                                                                                                \
    {                                                                                                          \
        const __m512bh w = bits == 8 ? widen(weights + 32 * s)                                                 \
                                     : look_up(s ? _mm512_srli_epi16(words, 4 * s) : words, table);            \
        for (int m = 0; m < rows; m++)                                                                         \
            part[m][s % chains] = _mm512_dpbf16_ps(part[m][s % chains], w, pair(x + m * pairs + s));            \
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

INLINE void any_block(const int bits, int rows, const uint32_t *x, long pairs, const uint8_t *weights,
                      const float *scales, long groups, __m512i table, float *sums) {
    switch (rows) {
#define CASE(n, chains) case n: block(bits, n, chains, x, pairs, weights, scales, groups, table, sums); break;
        CASE(1, 4) CASE(2, 4) CASE(3, 2) CASE(4, 2) CASE(5, 1) CASE(6, 1) CASE(7, 1) CASE(8, 1)
    }
}

INLINE void linear(const int bits, const uint16_t *x, const uint8_t *weights, const float *scales, void *y, int wide,
                   long rows, long in, long out, long groups, int threads) {
    uint16_t values[32];
    for (int i = 0; i < 32; i++) {
        const float value = (float)(i % 16 - 8);
        values[i] = (uint16_t)(*(const uint32_t *)&value >> 16);  // exact in bf16
    }
    const __m512i table = _mm512_loadu_si512(values);
    const long pairs = in / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < out / 16; n++) {
        for (long first = 0; first < rows; first += 8) {
            const int count = rows - first < 8 ? (int)(rows - first) : 8;
            float sums[8 * 16];
            any_block(bits, count, (const uint32_t *)x + first * pairs, pairs, weights + n * in * 2 * bits,
                      scales + n * groups * 16, groups, table, sums);
            for (int m = 0; m < count; m++) {
                const __m512 sum = _mm512_loadu_ps(sums + 16 * m);
                const long place = (first + m) * out + 16 * n;
                if (wide)
                    _mm512_storeu_ps((float *)y + place, sum);
                else
                    _mm256_storeu_si256((__m256i *)((uint16_t *)y + place), (__m256i)_mm512_cvtneps_pbh(sum));
            }
        }
    }
}

// y [rows, out]: bf16, or float where `wide`. out: a multiple of 16; in / groups: of 8.
#define LINEAR(name, bits)                                                                                           \
    void name(const uint16_t *x, const uint8_t *weights, const float *scales, void *y, int wide, long rows, long in, \
              long out, long groups, int threads) {                                                                  \
        linear(bits, x, weights, scales, y, wide, rows, in, out, groups, threads);                                   \
    }
LINEAR(int4_linear, 4)
LINEAR(int8_linear, 8)
