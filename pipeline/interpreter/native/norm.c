// y = round(round(x / sqrt(mean(x²) + eps)) * weight) of each row, all of one type, sums in fp32. torch takes six calls
// for it.
#include <math.h>

#include "vectors.h"

INLINE void norm(const int bf16, const void *x, const void *weight, void *y, float eps, long rows, long width) {
    for (long first = 0; first < rows * width; first += width) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long k = 0; k < width; k++) sum += get(bf16, x, first + k) * get(bf16, x, first + k);
        const float factor = 1.0f / sqrtf(sum / (float)width + eps);
        for (long k = 0; k < width; k++)
            put(bf16, y, first + k, as(bf16, get(bf16, x, first + k) * factor) * get(bf16, weight, k));
    }
}

void rms_norm(int bf16, const void *x, const void *weight, void *y, float eps, long rows, long width) {
    if (bf16)
        norm(1, x, weight, y, eps, rows, width);
    else
        norm(0, x, weight, y, eps, rows, width);
}
