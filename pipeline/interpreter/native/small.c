// What routers are made of and what lays tensors out anew: of few values each, so that what counts is that none of them
// interrupts a step. In fp32 unless a type is given; shapes of less than four dimensions begin with ones.
#include <math.h>

#include "vectors.h"

#include "calls.h"

enum { DIMS = 4 };

enum { SUM, PROD, SUB, DIV, MOST, LEAST, AVERAGE };  // in the order of operations/small.py

static float apply(int64_t op, float a, float b) {
    if (op == SUM) return a + b;
    if (op == PROD) return a * b;
    if (op == SUB) return a - b;
    if (op == DIV) return a / b;
    if (a != a || b != b) return NAN;
    return (op == MOST) == (a > b) ? a : b;
}

// y [dims] = a op b, whose values lie so many apart along each dimension: 0 where one serves for all.
typedef struct {
    int64_t op, bf16;
    const void *a, *b;
    void *y;
    int64_t dims[DIMS], a_steps[DIMS], b_steps[DIMS];
} elementwise_arguments;

// Where line i of a tensor starts: one of those along the last dimension.
INLINE long start_of_line(const int64_t *dims, const int64_t *steps, long i) {
    return i / (dims[1] * dims[2]) * steps[0] + i / dims[2] % dims[1] * steps[1] + i % dims[2] * steps[2];
}

// Only what is added to a stream of many values is worth vectors.
INLINE void apply_line(const int bf16, const elementwise_arguments *e, long a, long b, long y) {
    const long width = e->dims[3], a_step = e->a_steps[3], b_step = e->b_steps[3];
    if (e->op == SUM && a_step == 1 && b_step == 1)
#pragma omp simd
        for (long k = 0; k < width; k++) put(bf16, e->y, y + k, get(bf16, e->a, a + k) + get(bf16, e->b, b + k));
    else
        for (long k = 0; k < width; k++)
            put(bf16, e->y, y + k, apply(e->op, get(bf16, e->a, a + k * a_step), get(bf16, e->b, b + k * b_step)));
}

int elementwise(const void *arguments, void *scratch, team all) {
    const elementwise_arguments *e = arguments;
    for (long line = all.me; line < e->dims[0] * e->dims[1] * e->dims[2]; line += all.count) {
        const long a = start_of_line(e->dims, e->a_steps, line), b = start_of_line(e->dims, e->b_steps, line);
        if (e->bf16)
            apply_line(1, e, a, b, line * e->dims[3]);
        else
            apply_line(0, e, a, b, line * e->dims[3]);
    }
    return 0;
}

// y [dims] = x, whose values lie so many apart along each dimension, in another type or the same.
typedef struct {
    int64_t bf16_x;
    const void *x;
    int64_t bf16_y;
    void *y;
    int64_t dims[DIMS], steps[DIMS];
} copy_arguments;

INLINE void copy_lines(const int bf16_x, const int bf16_y, const copy_arguments *c, team all) {
    const long width = c->dims[3], step = c->steps[3];
    for (long line = all.me; line < c->dims[0] * c->dims[1] * c->dims[2]; line += all.count) {
        const long from = start_of_line(c->dims, c->steps, line);
        for (long k = 0; k < width; k++) put(bf16_y, c->y, line * width + k, get(bf16_x, c->x, from + k * step));
    }
}

int copy(const void *arguments, void *scratch, team all) {
    const copy_arguments *c = arguments;
    if (c->bf16_x && c->bf16_y)
        copy_lines(1, 1, c, all);
    else if (c->bf16_x)
        copy_lines(1, 0, c, all);
    else if (c->bf16_y)
        copy_lines(0, 1, c, all);
    else
        copy_lines(0, 0, c, all);
    return 0;
}

// y [outer, inner] = the sum, average, largest or smallest of x [outer, count, inner] along `count`.
typedef struct {
    int64_t op;
    const float *x;
    float *y;
    int64_t outer, count, inner;
} reduce_arguments;

int reduce(const void *arguments, void *scratch, team all) {
    const reduce_arguments *r = arguments;
    for (long i = all.me; i < r->outer * r->inner; i += all.count) {
        const float *x = r->x + i / r->inner * r->count * r->inner + i % r->inner;
        float result = *x;
        for (long n = 1; n < r->count; n++) {
            const float value = x[n * r->inner];
            result = r->op == AVERAGE ? result + value : apply(r->op, result, value);
        }
        r->y[i] = r->op == AVERAGE ? result / (float)r->count : result;
    }
    return 0;
}

// y [rows, width] = softmax(x) of each row, or the sigmoid of each value.
typedef struct {
    int64_t is_sigmoid;
    const float *x;
    float *y;
    int64_t rows, width;
} score_arguments;

int score_rows(const void *arguments, void *scratch, team all) {
    const score_arguments *s = arguments;
    for (long row = all.me; row < s->rows; row += all.count) {
        const float *x = s->x + row * s->width;
        float *y = s->y + row * s->width, most = -INFINITY, sum = 0;
        if (s->is_sigmoid) {
#pragma omp simd
            for (long k = 0; k < s->width; k++) y[k] = sigmoid(x[k]);
            continue;
        }
        for (long k = 0; k < s->width; k++) most = x[k] > most ? x[k] : most;
        for (long k = 0; k < s->width; k++) sum += y[k] = exponential(x[k] - most);
        for (long k = 0; k < s->width; k++) y[k] /= sum;
    }
    return 0;
}

// The `count` largest of each row of x [rows, width], in order, and where they are: of equal ones the first comes first.
// NaN is the largest, as in torch. `scratch`: of each thread `width` bytes.
typedef struct {
    const float *x;
    float *values;
    int32_t *places;
    int64_t rows, width, count;
} top_arguments;

INLINE int is_larger(float a, float b) { return a > b || (a != a && b == b); }

int top(const void *arguments, void *scratch, team all) {
    const top_arguments *t = arguments;
    char *taken = (char *)scratch + all.me * t->width;
    for (long row = all.me; row < t->rows; row += all.count) {
        const float *x = t->x + row * t->width;
        memset(taken, 0, t->width);
        for (long i = 0; i < t->count; i++) {
            long best = -1;
            for (long k = 0; k < t->width; k++)
                if (!taken[k] && (best < 0 || is_larger(x[k], x[best]))) best = k;
            taken[best] = 1;
            t->values[row * t->count + i] = x[best];
            t->places[row * t->count + i] = (int32_t)best;
        }
    }
    return 0;
}

// y [count, depth]: values[1] where places says, else values[0]; of a place that is none no row's value is set.
typedef struct {
    const int32_t *places;
    const float *values;
    float *y;
    int64_t count, depth;
} one_hot_arguments;

int one_hot(const void *arguments, void *scratch, team all) {
    const one_hot_arguments *o = arguments;
    for (long i = all.me; i < o->count; i += all.count)
        for (long k = 0; k < o->depth; k++) o->y[i * o->depth + k] = o->values[k == o->places[i]];
    return 0;
}

// y [rows, count] = the values of x [rows, width] at places [rows, count]; a negative one counts from the end. Refused
// where one is none.
typedef struct {
    const float *x;
    const int32_t *places;
    float *y;
    int64_t rows, width, count;
} pick_arguments;

int pick(const void *arguments, void *scratch, team all) {
    const pick_arguments *p = arguments;
    for (long i = 0; i < p->rows * p->count; i++)
        if (p->places[i] < -p->width || p->places[i] >= p->width) return 1;
    for (long i = all.me; i < p->rows * p->count; i += all.count) {
        const long place = p->places[i] < 0 ? p->places[i] + p->width : p->places[i];
        p->y[i] = p->x[i / p->count * p->width + place];
    }
    return 0;
}
