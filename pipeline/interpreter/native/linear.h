// What linear.c takes; experts.c, too, calls it.
#pragma once
#include <stdint.h>

// x and y [rows, out]: bf16 or float. bits, input_bits: as of a shape. out: a multiple of 16; in / groups: of 8, or of
// 32 where inputs have 8 bits. `scratch`: rows * (in * input_bits / 32 + 2 * parts + groups) integers, parts those of
// all groups.
typedef struct {
    int64_t bits, input_bits, bf16_x;
    const void *x;
    const uint8_t *weights;
    const float *scales;
    int64_t bf16_y;
    void *y;
    int64_t rows, in, out, groups;
} linear_arguments;
