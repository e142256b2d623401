// Vectors of the compiler (GCC's and clang's extension), as wide as the processor's, and bf16 as its bits.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BW__) && !defined(PORTABLE)
#define LANES 16
#else
#define LANES 8
#endif

#if (defined(__AVX512BW__) || defined(__AVX2__) || defined(__F16C__)) && !defined(PORTABLE)
#include <immintrin.h>
#endif

// The vector is in a register here, and its value nothing that the compiler knows.
#if defined(__AVX512BW__) || defined(__AVX2__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector) ((void)0)
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
#else
#if defined(__AVX512BW__)
    sum += (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    sum += (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
    KEEP(sum);  // else GCC makes the products of many sums first and adds them later, for which registers do not suffice
    return sum;
#endif
}

// sum + a * b, of two bytes in each 16 bits: those of a count from 0 to 127, those of b have a sign.
INLINE shorts add_pairs_of_bytes(shorts sum, ints a, ints b) {
#if defined(PORTABLE) || !(defined(__AVX512BW__) || defined(__AVX2__))
    const shorts x = (shorts)a, y = (shorts)b;
    return sum + (x & 0xff) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
#else
#if defined(__AVX512BW__)
    sum += (shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    sum += (shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
    KEEP(sum);
    return sum;
#endif
}

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE halves load_halves(const uint16_t *from) {
    halves values;
    memcpy(&values, from, sizeof values);
    return values;
}

// For several uses: GCC else loads it again for each.
INLINE floats keep(floats values) {
    KEEP(values);
    return values;
}

INLINE float sum_lanes(floats values) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
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

// GCC has no one instruction for this by itself.
INLINE ints widen_halves(halves values) {
#if defined(__AVX512BW__) && !defined(PORTABLE)
    return (ints)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(__AVX2__) && !defined(PORTABLE)
    return (ints)_mm256_cvtepu16_epi32((__m128i)values);
#else
    return __builtin_convertvector(values, ints);
#endif
}

INLINE floats load_values(const int bf16, const void *from, long place) {
    if (bf16) return (floats)(widen_halves(load_halves((const uint16_t *)from + place)) << 16);
    return load_floats((const float *)from + place);
}

// Weights of three types: a constant as `bf16` is.
enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE floats load_weights(const int type, const void *from, long place) {
    if (type != FLOAT16) return load_values(type == BFLOAT16, from, place);
#if defined(__AVX512BW__) && !defined(PORTABLE)
    return (floats)_mm512_cvtph_ps((__m256i)load_halves((const uint16_t *)from + place));
#elif defined(__F16C__) && !defined(PORTABLE)
    return (floats)_mm256_cvtph_ps((__m128i)load_halves((const uint16_t *)from + place));
#else
    // The exponent is 112 too low in fp32's place; that product is exact for subnormal ones, too. Weights are finite.
    const ints bits = widen_halves(load_halves((const uint16_t *)from + place));
    const floats size = (floats)((bits & 0x7fff) << 13) * power_of_two(112);
    return (floats)((ints)size | (bits & 0x8000) << 16);
#endif
}

INLINE void put(const int bf16, void *to, long place, float value) {
    if (bf16)
        ((uint16_t *)to)[place] = to_bf16(value);
    else
        ((float *)to)[place] = value;
}

INLINE float as(const int bf16, float value) { return bf16 ? from_bf16(to_bf16(value)) : value; }

// e^x for x <= 0, to 2e-7 relative: 2^n times a polynomial in what is left (Cephes' expf). 0 below -87, NaN for NaN.
INLINE float exponential(float x) {
    const float n = floorf((x > -87.0f ? x : -87.0f) * 1.44269504f + 0.5f);  // of NaN too a number: n becomes an int
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? 0.0f : p * power_of_two((int)n);
}

INLINE float sigmoid(float x) {
    const float power = exponential(-fabsf(x));
    return (x < 0 ? power : 1.0f) / (1.0f + power);
}

INLINE float silu(float x) { return x * sigmoid(x); }
