// y = softmax(q Kᵀ + bias) V for one query row of each head, over the blocks of a paged cache, which nothing copies.
// Query heads that share a key head are computed together. Scores, probabilities and sums are fp32.
#include <math.h>

#include "vectors.h"

#include "calls.h"

enum {
    PART = 8,  // query heads of one key head that a thread computes: latent attention has but one, with all heads' keys
    FEW = 4,   // of them at a time, and
    NEAR = 2,  // as many keys, or vectors of values: the sums stay in registers
    SOME = 64  // keys whose values stay in the cache while all vectors pass
};

typedef struct {
    long heads, kv_heads, columns, size, width, v_width, v_step, bias_step;
} shape;

// What a thread works in, for PART heads at most.
typedef struct {
    int64_t *rows;  // [keys]: of the pools, of those keys that have a bias other than -inf: no other is read
    float *scores;  // [heads, keys]
    float *sums;    // [heads, v_width]
} work;

// Of `count` heads and `near` keys; the heads' scores lie `step` apart.
INLINE void score(const int bf16, const int count, const int near, const void *q, long from, const void *k_pool,
                  const int64_t *rows, long width, float *scores, long step) {
    floats sum[FEW][NEAR];
    for (int g = 0; g < count; g++)
        for (int j = 0; j < near; j++) sum[g][j] = (floats){0};
    long d = 0;
    for (; d + LANES <= width; d += LANES) {
        floats keys[NEAR];
        for (int j = 0; j < near; j++) keys[j] = keep(load_values(bf16, k_pool, rows[j] * width + d));
        for (int g = 0; g < count; g++) {
            const floats query = keep(load_values(bf16, q, from + g * width + d));
            for (int j = 0; j < near; j++) sum[g][j] += query * keys[j];
        }
    }
    for (int g = 0; g < count; g++)
        for (int j = 0; j < near; j++) {
            float dot = sum_lanes(sum[g][j]);
            for (long i = d; i < width; i++)
                dot += get(bf16, q, from + g * width + i) * get(bf16, k_pool, rows[j] * width + i);
            scores[g * step + j] += dot;
        }
}

INLINE void score_all(const int bf16, const int count, const void *q, long from, const void *k_pool, const int64_t *rows,
                      long keys, long width, float *scores, long step) {
    long j = 0;
    for (; j + NEAR <= keys; j += NEAR)
        score(bf16, count, NEAR, q, from, k_pool, rows + j, width, scores + j, step);
    if (j < keys) score(bf16, count, 1, q, from, k_pool, rows + j, width, scores + j, step);
}

// sums [count, v_width] += scores times the values of `keys` rows, NEAR vectors of them and what is left one by one.
INLINE void add_values(const int bf16, const int count, const void *v_pool, const int64_t *rows, long keys, shape s,
                       const float *scores, long step, float *sums) {
    long d = 0;
    for (; d + NEAR * LANES <= s.v_width; d += NEAR * LANES) {
        floats sum[FEW][NEAR];
        for (int g = 0; g < count; g++)
            for (int v = 0; v < NEAR; v++) sum[g][v] = load_floats(sums + g * s.v_width + d + LANES * v);
        for (long j = 0; j < keys; j++)
            for (int v = 0; v < NEAR; v++) {
                const floats values = keep(load_values(bf16, v_pool, rows[j] * s.v_step + d + LANES * v));
                for (int g = 0; g < count; g++) sum[g][v] += scores[g * step + j] * values;
            }
        for (int g = 0; g < count; g++)
            for (int v = 0; v < NEAR; v++) store_floats(sums + g * s.v_width + d + LANES * v, sum[g][v]);
    }
    for (; d < s.v_width; d++)
        for (int g = 0; g < count; g++)
            for (long j = 0; j < keys; j++)
                sums[g * s.v_width + d] += scores[g * step + j] * get(bf16, v_pool, rows[j] * s.v_step + d);
}

// Scores become what their values weigh. Returns their sum.
INLINE float weigh(float *scores, long keys) {
    float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < keys; j++) most = scores[j] > most ? scores[j] : most;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < keys; j++) sum += scores[j] = exponential(scores[j] - most);
    return sum;
}

// `count` query heads from `first` on, of one sequence, that share a key head.
INLINE void attend_heads(const int bf16, const void *q, const void *k_pool, const void *v_pool, const int32_t *table,
                         const void *bias, void *y, shape s, long b, long head, long first, long count, work w) {
    const long most = s.columns * s.size;
    long keys = 0;
    for (long j = 0; j < most; j++) {
        const float added = get(bf16, bias, b * s.bias_step + j);
        if (added == -INFINITY) continue;
        w.rows[keys] = (table[b * s.columns + j / s.size] * s.kv_heads + head) * s.size + j % s.size;
        for (long g = 0; g < count; g++) w.scores[g * most + keys] = added;
        keys++;
    }
    const long from = (b * s.heads + first) * s.width, to = (b * s.heads + first) * s.v_width;
    long g = 0;
    for (; g + FEW <= count; g += FEW)
        score_all(bf16, FEW, q, from + g * s.width, k_pool, w.rows, keys, s.width, w.scores + g * most, most);
    for (; g < count; g++)
        score_all(bf16, 1, q, from + g * s.width, k_pool, w.rows, keys, s.width, w.scores + g * most, most);
    float totals[PART];
    for (g = 0; g < count; g++) totals[g] = weigh(w.scores + g * most, keys);
    memset(w.sums, 0, count * s.v_width * sizeof(float));
    for (long j = 0; j < keys; j += SOME) {
        const long some = keys - j < SOME ? keys - j : SOME;
        for (g = 0; g + FEW <= count; g += FEW)
            add_values(bf16, FEW, v_pool, w.rows + j, some, s, w.scores + g * most + j, most, w.sums + g * s.v_width);
        for (; g < count; g++)
            add_values(bf16, 1, v_pool, w.rows + j, some, s, w.scores + g * most + j, most, w.sums + g * s.v_width);
    }
    for (g = 0; g < count; g++)
        for (long d = 0; d < s.v_width; d++)
            put(bf16, y, to + g * s.v_width + d, w.sums[g * s.v_width + d] / totals[g]);
}

// q [batch, heads, width], pools [blocks, kv_heads, size, width or v_step], of which v_width are values; table [batch,
// columns], bias [batch, columns * size], rows bias_step values apart, y [batch, heads, v_width]. `scratch`: of each
// thread columns * size integers of 64 bits and PART, or heads / kv_heads where that is less, times (columns * size +
// v_width) floats. Refused where the table names a block that is none.
typedef struct {
    int64_t bf16;
    const void *q, *k_pool, *v_pool;
    const int32_t *table;
    const void *bias;
    void *y;
    int64_t blocks, batch, heads, kv_heads, columns, size, width, v_width, v_step, bias_step;
} attention_arguments;

int attend_pages(const void *arguments, void *scratch, team all) {
    const attention_arguments *a = arguments;
    for (long i = 0; i < a->batch * a->columns; i++)
        if (a->table[i] < 0 || a->table[i] >= a->blocks) return 1;
    const shape s = {a->heads, a->kv_heads, a->columns, a->size, a->width, a->v_width, a->v_step, a->bias_step};
    const long group = s.heads / s.kv_heads, most = group < PART ? group : PART, parts = (group + most - 1) / most;
    const long keys = s.columns * s.size, bytes = 8 * keys + 4 * most * (keys + s.v_width);
    work w = {(int64_t *)((char *)scratch + all.me * ((bytes + 7) / 8 * 8))};
    w.scores = (float *)(w.rows + keys);
    w.sums = w.scores + most * keys;
    for (long i = all.me; i < a->batch * s.kv_heads * parts; i += all.count) {
        const long b = i / (s.kv_heads * parts), head = i / parts % s.kv_heads, part = i % parts * most;
        const long first = head * group + part, count = group - part < most ? group - part : most;
        if (a->bf16)
            attend_heads(1, a->q, a->k_pool, a->v_pool, a->table, a->bias, a->y, s, b, head, first, count, w);
        else
            attend_heads(0, a->q, a->k_pool, a->v_pool, a->table, a->bias, a->y, s, b, head, first, count, w);
    }
    return 0;
}
