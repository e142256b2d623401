// Vectors of the compiler (GCC's and clang's extension), as wide as the processor's, and bf16 as its bits.
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BF16__) && !defined(PORTABLE)
#include <immintrin.h>
#define BF16_PRODUCTS
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

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

INLINE float from_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// To nearest, ties to even; NaN stays one.
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
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
