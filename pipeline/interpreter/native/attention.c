// y = softmax(q Kᵀ + bias) V for one query row of each head, over the blocks of a paged cache, which nothing copies.
// Query heads that share a key head are computed together. Scores, probabilities and sums are fp32.
#include <math.h>

#include "vectors.h"

#include "calls.h"

INLINE void softmax(float *scores, long keys) {
    float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < keys; j++) most = scores[j] > most ? scores[j] : most;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < keys; j++) sum += scores[j] = exponential(scores[j] - most);
    for (long j = 0; j < keys; j++) scores[j] /= sum;
}

typedef struct {
    long heads, kv_heads, columns, size, width, v_width, bias_step;
} shape;

// One key head of one sequence. Blocks are looked up as the rows come, and a key whose bias is -inf is not read.
INLINE void attend_head(const int bf16, const void *q, const void *k_pool, const void *v_pool, const int32_t *table,
                        const void *bias, void *y, shape s, long b, long head, float *scores) {
    const long group = s.heads / s.kv_heads, keys = s.columns * s.size, first = b * s.heads + head * group;
    float *sums = scores + group * keys;
    for (long j = 0; j < keys; j++) {
        const float added = get(bf16, bias, b * s.bias_step + j);
        const long row = (table[b * s.columns + j / s.size] * s.kv_heads + head) * s.size + j % s.size;
        for (long g = 0; g < group; g++) {
            float dot = 0;
            if (added != -INFINITY) {
#pragma omp simd reduction(+ : dot)
                for (long d = 0; d < s.width; d++)
                    dot += get(bf16, q, (first + g) * s.width + d) * get(bf16, k_pool, row * s.width + d);
            }
            scores[g * keys + j] = dot + added;
        }
    }
    for (long g = 0; g < group; g++) softmax(scores + g * keys, keys);
    memset(sums, 0, group * s.v_width * sizeof(float));
    for (long j = 0; j < keys; j++) {
        const long row = (table[b * s.columns + j / s.size] * s.kv_heads + head) * s.size + j % s.size;
        if (scores[j] == 0 && get(bf16, bias, b * s.bias_step + j) == -INFINITY) continue;
        for (long g = 0; g < group; g++)
            for (long d = 0; d < s.v_width; d++)
                sums[g * s.v_width + d] += scores[g * keys + j] * get(bf16, v_pool, row * s.v_width + d);
    }
    for (long d = 0; d < group * s.v_width; d++) put(bf16, y, first * s.v_width + d, sums[d]);
}

// q [batch, heads, width], pools [blocks, kv_heads, size, width or v_width], table [batch, columns], bias
// [batch, columns * size], rows bias_step values apart, y [batch, heads, v_width]. `scratch`: of each thread
// heads / kv_heads * (columns * size + v_width) floats. Refused where the table names a block that is none.
typedef struct {
    int64_t bf16;
    const void *q, *k_pool, *v_pool;
    const int32_t *table;
    const void *bias;
    void *y;
    int64_t blocks, batch, heads, kv_heads, columns, size, width, v_width, bias_step;
} attention_arguments;

int attend_pages(const void *arguments, void *scratch, team all) {
    const attention_arguments *a = arguments;
    for (long i = 0; i < a->batch * a->columns; i++)
        if (a->table[i] < 0 || a->table[i] >= a->blocks) return 1;
    const shape s = {a->heads, a->kv_heads, a->columns, a->size, a->width, a->v_width, a->bias_step};
    float *own = (float *)scratch + all.me * (s.heads / s.kv_heads * (s.columns * s.size + s.v_width));
    for (long i = all.me; i < a->batch * s.kv_heads; i += all.count) {
        const long b = i / s.kv_heads, head = i % s.kv_heads;
        if (a->bf16)
            attend_head(1, a->q, a->k_pool, a->v_pool, a->table, a->bias, a->y, s, b, head, own);
        else
            attend_head(0, a->q, a->k_pool, a->v_pool, a->table, a->bias, a->y, s, b, head, own);
    }
    return 0;
}
