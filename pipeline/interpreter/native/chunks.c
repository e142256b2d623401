// y = softmax(q Kᵀ + bias) V for chunks of several query rows, over the blocks of a paged cache, which nothing copies:
// block by block, with the largest score so far (Dao et al., "FlashAttention", 2022, arXiv 2205.14135). All is fp32.
#include <math.h>

#include "vectors.h"

#include "calls.h"

enum {
    ROWS = 64,         // about as many rows of queries, of all heads that share a key head, are computed at a time
    FEW = 4,           // of them at once, and
    WIDE = 2 * LANES,  // as many columns: the sums stay in registers
    NEAR = 2,          // keys at once, where they are
    LONG = 256         // values or longer: as they lie they are then multiplied faster than they are transposed
};

// q [rows, heads, width] and y [rows, heads, v_width]; pools [blocks, kv_heads, size, width or v_step], of which v_width
// are values; table [batch, columns]; bias: [columns * size] for each query, query_step values apart, and batch_step for
// each sequence. places [batch, queries]: the row of each query, and of what pads a sequence any row; unpad [rows]: the
// query of each row. `scratch`: of each thread as many floats as the struct `work` takes. Refused where the table names
// a block, or places and unpad a row or a query, that is none, or places are not where unpad says. size, v_width:
// multiples of WIDE.
typedef struct {
    const float *q, *k_pool, *v_pool;
    const int32_t *table;
    const float *bias;
    const int32_t *places, *unpad;
    float *y;
    int64_t rows, blocks, batch, queries, heads, kv_heads, columns, size, width, v_width, v_step, batch_step, query_step;
} chunk_arguments;

// What a thread works in, for `count` rows.
typedef struct {
    float *q;       // [count, width]
    float *keys;    // [width, size]: of a block, transposed
    float *scores;  // [count, size]
    float *sums;    // [count, v_width]
    float *most;    // [count]: the largest score so far
    float *total;   // [count]: the sum of what became of the scores
} work;

INLINE void multiply_few(const int count, const float *a, long a_step, const float *b, long b_step, long columns,
                         long depth, float *c, const int add) {
    for (long n = 0; n < columns; n += WIDE) {
        floats sum[FEW][2];
        for (int m = 0; m < count; m++)
            for (int v = 0; v < 2; v++) sum[m][v] = add ? load_floats(c + m * columns + n + LANES * v) : (floats){0};
        for (long k = 0; k < depth; k++)
            for (int v = 0; v < 2; v++) {
                const floats right = keep(load_floats(b + k * b_step + n + LANES * v));
                for (int m = 0; m < count; m++) sum[m][v] += a[m * a_step + k] * right;
            }
        for (int m = 0; m < count; m++)
            for (int v = 0; v < 2; v++) store_floats(c + m * columns + n + LANES * v, sum[m][v]);
    }
}

// c [count, columns] = a [count, depth] b [depth, columns], or that much more. Rows of a and b lie so far apart.
INLINE void multiply(long count, const float *a, long a_step, const float *b, long b_step, long columns, long depth,
                     float *c, const int add) {
    long m = 0;
    for (; m + FEW <= count; m += FEW)
        multiply_few(FEW, a + m * a_step, a_step, b, b_step, columns, depth, c + m * columns, add);
    for (; m < count; m++)
        multiply_few(1, a + m * a_step, a_step, b, b_step, columns, depth, c + m * columns, add);
}

INLINE void dot_few(const int count, const float *q, const float *keys, long width, float *scores, long step) {
    floats sum[FEW][NEAR];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < NEAR; j++) sum[m][j] = (floats){0};
    for (long d = 0; d < width; d += LANES) {
        floats key[NEAR];
        for (int j = 0; j < NEAR; j++) key[j] = keep(load_floats(keys + j * width + d));
        for (int m = 0; m < count; m++) {
            const floats query = keep(load_floats(q + m * width + d));
            for (int j = 0; j < NEAR; j++) sum[m][j] += query * key[j];
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < NEAR; j++) scores[m * step + j] = sum_lanes(sum[m][j]);
}

// scores [count, size] = q [count, width] keysᵀ, of the first `seen` keys, NEAR at a time.
INLINE void dot(long count, const float *q, const float *keys, long width, float *scores, long size, long seen) {
    for (long m = 0; m < count; m += FEW)
        for (long j = 0; j < seen; j += NEAR) {
            if (m + FEW <= count)
                dot_few(FEW, q + m * width, keys + j * width, width, scores + m * size + j, size);
            else
                for (long i = m; i < count; i++)
                    dot_few(1, q + i * width, keys + j * width, width, scores + i * size + j, size);
        }
}

INLINE void transpose(const float *from, long rows, long columns, float *to) {
    for (long first = 0; first < rows; first += LANES)
        for (long d = 0; d < columns; d++)
            for (long j = first; j < first + LANES; j++) to[d * rows + j] = from[j * columns + d];
}

// Up to the last key of a block that any of the queries sees.
INLINE long count_seen(const chunk_arguments *a, const float *bias, long queries) {
    long seen = 0;
    for (long i = 0; i < queries; i++)
        for (long j = a->size; j > seen; j--)
            if (bias[i * a->query_step + j - 1] != -INFINITY) seen = j;
    return seen;
}

// Scores of one row become what their values weigh; what was summed before is brought to the same scale.
INLINE void weigh(const chunk_arguments *a, const float *bias, float *scores, float *sums, float *most, float *total) {
    float largest = *most, sum = 0;
#pragma omp simd reduction(max : largest)
    for (long j = 0; j < a->size; j++) {
        scores[j] = bias[j] == -INFINITY ? -INFINITY : scores[j] + bias[j];
        largest = scores[j] > largest ? scores[j] : largest;
    }
    const float zero = largest == -INFINITY ? 0 : largest, factor = exponential(*most - zero);
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < a->size; j++) sum += scores[j] = exponential(scores[j] - zero);
    for (long d = 0; d < a->v_width; d++) sums[d] *= factor;
    *total = *total * factor + sum;
    *most = largest;
}

// Of sequence b and one key head the queries from `first` on.
INLINE void attend_rows(const chunk_arguments *a, long b, long head, long first, long queries, work w) {
    const long group = a->heads / a->kv_heads, count = group * queries;
    const int32_t *places = a->places + b * a->queries + first, at = (int32_t)(b * a->queries + first);
    for (long m = 0; m < count; m++) {
        const long from = places[m % queries] * a->heads + head * group + m / queries;
        memcpy(w.q + m * a->width, a->q + from * a->width, a->width * sizeof(float));
        w.most[m] = -INFINITY, w.total[m] = 0;
    }
    memset(w.sums, 0, count * a->v_width * sizeof(float));
    for (long c = 0; c < a->columns; c++) {
        const float *bias = a->bias + b * a->batch_step + first * a->query_step + c * a->size;
        const long seen = count_seen(a, bias, queries);
        if (!seen) continue;
        const long row = (a->table[b * a->columns + c] * a->kv_heads + head) * a->size;
        const float *keys = a->k_pool + row * a->width;
        if (a->width >= LONG && a->width % LANES == 0) {
            dot(count, w.q, keys, a->width, w.scores, a->size, seen);
        } else {
            transpose(keys, a->size, a->width, w.keys);
            multiply(count, w.q, a->width, w.keys, a->size, a->size, a->width, w.scores, 0);
        }
        for (long m = 0; m < count; m++)
            weigh(a, bias + m % queries * a->query_step, w.scores + m * a->size, w.sums + m * a->v_width, w.most + m,
                  w.total + m);
        multiply(count, w.scores, a->size, a->v_pool + row * a->v_step, a->v_step, a->v_width, seen, w.sums, 1);
    }
    for (long m = 0; m < count; m++) {
        if (a->unpad[places[m % queries]] != at + m % queries) continue;  // padding
        float *to = a->y + (places[m % queries] * a->heads + head * group + m / queries) * a->v_width;
        for (long d = 0; d < a->v_width; d++) to[d] = w.sums[m * a->v_width + d] / w.total[m];
    }
}

int attend_chunks(const void *arguments, void *scratch, team all) {
    const chunk_arguments *a = arguments;
    for (long i = 0; i < a->batch * a->columns; i++)
        if (a->table[i] < 0 || a->table[i] >= a->blocks) return 1;
    for (long i = 0; i < a->batch * a->queries; i++)
        if (a->places[i] < 0 || a->places[i] >= a->rows) return 1;
    for (long i = 0; i < a->rows; i++)
        if (a->unpad[i] < 0 || a->unpad[i] >= a->batch * a->queries || a->places[a->unpad[i]] != i) return 1;
    const long group = a->heads / a->kv_heads, step = group < ROWS ? ROWS / group : 1, most = group * step;
    work w = {(float *)scratch + all.me * (most * (a->width + a->size + a->v_width + 2) + a->width * a->size)};
    w.keys = w.q + most * a->width;
    w.scores = w.keys + a->width * a->size;
    w.sums = w.scores + most * a->size;
    w.most = w.sums + most * a->v_width;
    w.total = w.most + most;
    open_shares(all);  // later chunks see more keys than earlier ones
    const long steps = (a->queries + step - 1) / step;
    for (long i; (i = take_share(1, all)) < a->batch * steps * a->kv_heads;) {
        const long b = i / (steps * a->kv_heads), first = i / a->kv_heads % steps * step, head = i % a->kv_heads;
        long queries = a->queries;  // without padding at the end
        while (queries > first && a->unpad[a->places[b * a->queries + queries - 1]] != b * a->queries + queries - 1)
            queries--;
        if (first < queries)
            attend_rows(a, b, head, first, queries - first < step ? queries - first : step, w);
    }
    return 0;
}
