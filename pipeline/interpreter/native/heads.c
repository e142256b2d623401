// y = x W for each of several heads with a matrix of its own, or for one: weights of 16 bits are read as they are stored,
// half of what they take in fp32. Sums are fp32.
//
// Of each head, for every 16 outputs, a row of 16 weights for each input.
#include "vectors.h"

#include "calls.h"

enum {
    VECTORS = 16 / LANES,  // of 16 outputs
    TILE = 8 / VECTORS,    // rows whose sums are in registers
    NEAR = 4,              // blocks of 16 outputs that a thread takes at once, at most
};

// x: value k of row r of head h is at h * x_head + r * x_row + k, and y likewise. type: of the weights. out: a multiple
// of 16.
typedef struct {
    int64_t type, bf16_x;
    const void *x, *weights;
    int64_t bf16_y;
    void *y;
    int64_t heads, rows, in, out, x_head, x_row, y_head, y_row;
} heads_arguments;

// `count` rows from place `from` of x on, 16 outputs whose weights start at `block`, to place `to` of y.
INLINE void multiply_rows(const int type, const int bf16, const int count, const heads_arguments *a, long from, long block,
                          long to) {
    floats total[TILE][VECTORS];
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++) total[m][v] = (floats){0};
    for (long k = 0; k < a->in; k++) {
        floats weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = keep(load_weights(type, a->weights, block + 16 * k + LANES * v));
        for (int m = 0; m < count; m++)
            for (int v = 0; v < VECTORS; v++) total[m][v] += get(bf16, a->x, from + m * a->x_row + k) * weights[v];
    }
    for (int m = 0; m < count; m++)
        for (int v = 0; v < VECTORS; v++)
            for (int i = 0; i < LANES; i++)
                if (a->bf16_y)
                    put(1, a->y, to + m * a->y_row + LANES * v + i, total[m][v][i]);
                else
                    put(0, a->y, to + m * a->y_row + LANES * v + i, total[m][v][i]);
}

INLINE void multiply(const int type, const int bf16, const heads_arguments *a, long head, long n) {
    const long block = (head * a->out + 16 * n) * a->in;
    for (long row = 0; row < a->rows; row += TILE) {
        const long from = head * a->x_head + row * a->x_row, to = head * a->y_head + row * a->y_row + 16 * n;
        switch (a->rows - row < TILE ? a->rows - row : TILE) {
#define CASE(count)                                             \
    case count:                                                 \
        multiply_rows(type, bf16, count, a, from, block, to); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
    }
}

INLINE void share_blocks(const int type, const int bf16, const heads_arguments *a, team all) {
    const long blocks = a->out / 16, items = a->heads * blocks, near = size_share(items, NEAR, all);
    for (long first; (first = take_share(near, all)) < items;)
        for (long i = first; i < items && i < first + near; i++) multiply(type, bf16, a, i / blocks, i % blocks);
}

int multiply_heads(const void *arguments, void *scratch, team all) {
    const heads_arguments *a = arguments;
    open_shares(all);
    switch (a->type + 3 * a->bf16_x) {
#define TYPE(type, bf16)                     \
    case type + 3 * bf16:                    \
        share_blocks(type, bf16, a, all); \
        break;
        TYPE(FLOAT32, 0) TYPE(BFLOAT16, 0) TYPE(FLOAT16, 0)
        TYPE(FLOAT32, 1) TYPE(BFLOAT16, 1) TYPE(FLOAT16, 1)
    }
    return 0;
}
