// Element by element, of values of one type, for which torch takes several calls. Computed in fp32.
#include <math.h>

#include "vectors.h"

INLINE void norm(const int bf16, const void *x, const void *added, void *sum, const void *weight, void *y, float eps,
                 long rows, long width) {
    for (long first = 0; first < rows * width; first += width) {
        if (added) {
#pragma omp simd
            for (long k = first; k < first + width; k++) put(bf16, sum, k, get(bf16, x, k) + get(bf16, added, k));
        }
        const void *from = added ? sum : x;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long k = first; k < first + width; k++) squares += get(bf16, from, k) * get(bf16, from, k);
        const float factor = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
        for (long k = 0; k < width; k++)
            put(bf16, y, first + k, as(bf16, get(bf16, from, first + k) * factor) * get(bf16, weight, k));
    }
}

// y = round(round(x / sqrt(mean(x²) + eps)) * weight) of each row [rows, width], or of sum = round(x + added) where there
// is something to add.
void rms_norm(int bf16, const void *x, const void *added, void *sum, const void *weight, void *y, float eps, long rows,
              long width) {
    if (bf16)
        norm(1, x, added, sum, weight, y, eps, rows, width);
    else
        norm(0, x, added, sum, weight, y, eps, rows, width);
}

INLINE void gate_rows(const int bf16, const void *g, const void *u, void *y, long rows, long width, long g_step,
                      long u_step) {
    for (long row = 0; row < rows; row++) {
#pragma omp simd
        for (long k = 0; k < width; k++) {
            const float x = get(bf16, g, row * g_step + k), power = exponential(-fabsf(x));
            const float silu = x * ((x < 0 ? power : 1.0f) / (1.0f + power));
            put(bf16, y, row * width + k, as(bf16, silu) * get(bf16, u, row * u_step + k));
        }
    }
}

// y [rows, width] = round(silu(g)) * u, rounded; rows of g and u lie so many values apart.
void gate(int bf16, const void *g, const void *u, void *y, long rows, long width, long g_step, long u_step) {
    if (bf16)
        gate_rows(1, g, u, y, rows, width, g_step, u_step);
    else
        gate_rows(0, g, u, y, rows, width, g_step, u_step);
}
