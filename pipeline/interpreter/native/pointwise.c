// Element by element, of values of one type, for which torch takes several calls. Computed in fp32.
#include <math.h>

#include "vectors.h"

#include "calls.h"

// y = round(round(x / sqrt(mean(x²) + eps)) * weight) of each row [rows, width], or of sum = round(x + added) where there
// is something to add. Rows of x lie x_step values apart, and those of `added` as well.
typedef struct {
    int64_t bf16;
    const void *x, *added;
    void *sum;
    const void *weight;
    void *y;
    const float *eps;
    int64_t rows, width, x_step;
} norm_arguments;

INLINE void norm_row(const int bf16, const norm_arguments *a, long row) {
    const long to = row * a->width, width = a->width;
    const void *from = a->x;
    long first = row * a->x_step;
    if (a->added) {
#pragma omp simd
        for (long k = 0; k < width; k++)
            put(bf16, a->sum, to + k, get(bf16, a->x, first + k) + get(bf16, a->added, first + k));
        from = a->sum, first = to;
    }
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long k = 0; k < width; k++) squares += get(bf16, from, first + k) * get(bf16, from, first + k);
    const float factor = 1.0f / sqrtf(squares / (float)width + *a->eps);
#pragma omp simd
    for (long k = 0; k < width; k++)
        put(bf16, a->y, to + k, as(bf16, get(bf16, from, first + k) * factor) * get(bf16, a->weight, k));
}

int rms_norm(const void *arguments, void *scratch, team all) {
    const norm_arguments *a = arguments;
    for (long row = all.me; row < a->rows; row += all.count) {
        if (a->bf16)
            norm_row(1, a, row);
        else
            norm_row(0, a, row);
    }
    return 0;
}

// y [rows, width] = round(silu(g)) * u, rounded; rows of g and u lie so many values apart.
typedef struct {
    int64_t bf16;
    const void *g, *u;
    void *y;
    int64_t rows, width, g_step, u_step;
} gate_arguments;

INLINE void gate_row(const int bf16, const gate_arguments *a, long row) {
#pragma omp simd
    for (long k = 0; k < a->width; k++) {
        const float g = silu(get(bf16, a->g, row * a->g_step + k));
        put(bf16, a->y, row * a->width + k, as(bf16, g) * get(bf16, a->u, row * a->u_step + k));
    }
}

int gate(const void *arguments, void *scratch, team all) {
    const gate_arguments *a = arguments;
    for (long row = all.me; row < a->rows; row += all.count) {
        if (a->bf16)
            gate_row(1, a, row);
        else
            gate_row(0, a, row);
    }
    return 0;
}
