// y = round(round(x / sqrt(mean(x²) + eps)) * weight) of each row, all of one type, sums in fp32. torch takes six calls
// for it.
#include <math.h>

#include "vectors.h"

#define NORM(name, type, widen, narrow)                                                             \
    void name(const type *x, const type *weight, type *y, float eps, long rows, long width) {       \
        for (long row = 0; row < rows; row++, x += width, y += width) {                             \
            float sum = 0;                                                                          \
            _Pragma("omp simd reduction(+ : sum)") for (long k = 0; k < width; k++)                 \
                sum += widen(x[k]) * widen(x[k]);                                                   \
            const float factor = 1.0f / sqrtf(sum / (float)width + eps);                            \
            for (long k = 0; k < width; k++)                                                        \
                y[k] = narrow(widen(narrow(widen(x[k]) * factor)) * widen(weight[k]));              \
        }                                                                                           \
    }
#define SAME(value) (value)
NORM(rms_norm_bf16, uint16_t, from_bf16, to_bf16)
NORM(rms_norm_fp32, float, SAME, SAME)
