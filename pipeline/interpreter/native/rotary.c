// Queries and keys of each packed row rotated, keys and values written to their places in a paged cache: one pass over
// what the projection made. Computed in fp32, rounded once.
#include "vectors.h"

#include "calls.h"

typedef struct {
    long rows, heads, kv_heads, others, width, dim;  // others: heads of x behind the values'; dim: rotated of width
} shape;

// Pairs of neighbours turn by complex numbers, halves by cos and by sin with its sign, both as wide as they are.
INLINE void rotate(const int bf16, int pairs, const void *x, const float *cos, const float *sin, void *y, long from,
                   long to, shape s) {
    const long half = s.dim / 2;
    if (pairs)
        for (long i = 0; i < half; i++) {
            const float a = get(bf16, x, from + 2 * i), b = get(bf16, x, from + 2 * i + 1);
            put(bf16, y, to + 2 * i, a * cos[2 * i] - b * cos[2 * i + 1]);
            put(bf16, y, to + 2 * i + 1, b * cos[2 * i] + a * cos[2 * i + 1]);
        }
    else
        for (long i = 0; i < half; i++) {
            const float a = get(bf16, x, from + i), b = get(bf16, x, from + half + i);
            put(bf16, y, to + i, a * cos[i] + b * sin[i]);
            put(bf16, y, to + half + i, b * cos[half + i] + a * sin[half + i]);
        }
    for (long d = s.dim; d < s.width; d++) put(bf16, y, to + d, get(bf16, x, from + d));
}

INLINE void write_row(const int bf16, int pairs, const void *x, const float *cos, const float *sin,
                      const int64_t *places, void *keys, void *values, void *q, shape s, long row) {
    const long turned = s.heads + s.kv_heads, all = turned + s.kv_heads + s.others;
    for (long head = 0; head < turned; head++) {
        const long angles = (row * turned + head) * s.dim, from = (row * all + head) * s.width;
        const long key = head - s.heads;
        if (key < 0)
            rotate(bf16, pairs, x, cos + angles, sin + angles, q, from, (row * s.heads + head) * s.width, s);
        else
            rotate(bf16, pairs, x, cos + angles, sin + angles, keys, from, places[row * s.kv_heads + key] * s.width, s);
    }
    for (long head = 0; head < s.kv_heads; head++)
        for (long d = 0; d < s.width; d++)
            put(bf16, values, places[row * s.kv_heads + head] * s.width + d,
                get(bf16, x, (row * all + turned + head) * s.width + d));
}

// x [rows, heads + 2 kv_heads + others, width], cos and sin [rows, heads + kv_heads, dim] (of pairs cos
// [..., dim / 2, 2] holds both), places [rows, kv_heads]: rows of the pools, which have `cached` of width. q [rows,
// heads, width]. Refused where a place is none.
typedef struct {
    int64_t bf16, pairs;
    const void *x;
    const float *cos, *sin;
    const int64_t *places;
    void *keys, *values, *q;
    int64_t rows, heads, kv_heads, others, width, dim, cached;
} rotation_arguments;

int rotate_into_cache(const void *arguments, void *scratch, team all) {
    const rotation_arguments *a = arguments;
    for (long i = 0; i < a->rows * a->kv_heads; i++)
        if (a->places[i] < 0 || a->places[i] >= a->cached) return 1;
    const shape s = {a->rows, a->heads, a->kv_heads, a->others, a->width, a->dim};
    for (long row = all.me; row < s.rows; row += all.count) {
        if (a->bf16)
            write_row(1, a->pairs, a->x, a->cos, a->sin, a->places, a->keys, a->values, a->q, s, row);
        else
            write_row(0, a->pairs, a->x, a->cos, a->sin, a->places, a->keys, a->values, a->q, s, row);
    }
    return 0;
}

// Of each packed row and head what is not rotated, times a factor, and what is, side by side: rows of y, or of a paged
// cache. left [rows, heads, width] and right [rows, heads, dim] lie so many values apart, cos and sin [rows, dim] are as
// above. places [rows, heads]: rows of y, which has `cached` of width + dim; without them they follow one another.
// Refused where a place is none.
typedef struct {
    int64_t bf16, pairs;
    const void *left, *right;
    const float *cos, *sin, *factor;
    const int64_t *places;
    void *y;
    int64_t rows, heads, width, dim, left_row, left_head, right_row, right_head, cached;
} joined_arguments;

INLINE void join_row(const int bf16, const joined_arguments *a, long row) {
    const shape s = {.width = a->dim, .dim = a->dim};
    const float factor = a->factor ? *a->factor : 1;
    for (long head = 0; head < a->heads; head++) {
        const long place = row * a->heads + head, to = (a->places ? a->places[place] : place) * (a->width + a->dim);
        const long from = row * a->left_row + head * a->left_head;
        for (long d = 0; d < a->width; d++) put(bf16, a->y, to + d, get(bf16, a->left, from + d) * factor);
        rotate(bf16, (int)a->pairs, a->right, a->cos + row * a->dim, a->sin + row * a->dim, a->y,
               row * a->right_row + head * a->right_head, to + a->width, s);
    }
}

int join_rotated(const void *arguments, void *scratch, team all) {
    const joined_arguments *a = arguments;
    for (long i = 0; a->places && i < a->rows * a->heads; i++)
        if (a->places[i] < 0 || a->places[i] >= a->cached) return 1;
    for (long row = all.me; row < a->rows; row += all.count) {
        if (a->bf16)
            join_row(1, a, row);
        else
            join_row(0, a, row);
    }
    return 0;
}
