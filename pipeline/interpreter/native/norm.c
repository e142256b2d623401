// y = bf16(bf16(x / sqrt(mean(x²) + eps)) * weight) of each row, all bf16, sums in fp32. torch takes six calls for it.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

static inline __m512 widen(__mmask16 mask, const uint16_t *values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values)), 16));
}

static inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

static inline __mmask16 left(long width, long k) {
    return width - k < 16 ? (__mmask16)((1u << (width - k)) - 1) : (__mmask16)0xffff;
}

void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *y, float eps, long rows, long width) {
    for (long row = 0; row < rows; row++, x += width, y += width) {
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (long k = 0; k < width; k += 16) {
            const __m512 value = widen(left(width, k), x + k);
            sums[k / 16 % 2] = _mm512_fmadd_ps(value, value, sums[k / 16 % 2]);
        }
        const float mean = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])) / (float)width;
        const __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
        for (long k = 0; k < width; k += 16) {
            const __mmask16 mask = left(width, k);
            const __m256i normal = narrow(_mm512_mul_ps(widen(mask, x + k), factor));
            const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(normal), 16));
            _mm256_mask_storeu_epi16(y + k, mask, narrow(_mm512_mul_ps(wide, widen(mask, weight + k))));
        }
    }
}
