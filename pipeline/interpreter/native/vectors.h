// Vectors of the compiler (GCC's and clang's extension), as wide as the processor's, and bf16 as its bits.
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BW__) && !defined(PORTABLE)
#define LANES 16
#else
#define LANES 8
#endif

#if (defined(__AVX512BW__) || defined(__AVX2__)) && !defined(PORTABLE)
#include <immintrin.h>
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

INLINE floats load_floats(const float *from) {
    floats values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store_floats(float *to, floats values) { memcpy(to, &values, sizeof values); }

INLINE ints load_ints(const void *from) {
    ints values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE floats widen(ints values) { return __builtin_convertvector(values, floats); }

// sum + a * b, of two integers of 16 bits in each 32.
INLINE ints add_pairs(ints sum, ints a, ints b) {
#if defined(PORTABLE) || !(defined(__AVX512BW__) || defined(__AVX2__))
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#elif defined(__AVX512BW__)
    return sum + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return sum + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 2^n, for n from -126 to 127.
INLINE float power_of_two(int n) { return of_bits((uint32_t)(n + 127) << 23); }

INLINE float from_bf16(uint16_t bits) { return of_bits((uint32_t)bits << 16); }

// To nearest, ties to even; NaN stays one.
INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    return (uint16_t)(value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
}

// Values of either type: `bf16` is a constant wherever these are used, so that nothing is asked at run time.
INLINE float get(const int bf16, const void *from, long place) {
    return bf16 ? from_bf16(((const uint16_t *)from)[place]) : ((const float *)from)[place];
}

INLINE void put(const int bf16, void *to, long place, float value) {
    if (bf16)
        ((uint16_t *)to)[place] = to_bf16(value);
    else
        ((float *)to)[place] = value;
}

INLINE float as(const int bf16, float value) { return bf16 ? from_bf16(to_bf16(value)) : value; }
