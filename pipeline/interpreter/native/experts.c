// Routed experts: y [rows, hidden] = the sum over experts of weight * down(silu(fc(x)) * up(x)), each expert on the rows
// that give it a weight other than zero. Which they are is known only here, so that this is one call for all of them.
#include "vectors.h"

#include "calls.h"

#include "linear.h"

// One of an expert's linears. prescale: [in], prescale_step values apart for each expert, or none.
typedef struct {
    const uint8_t *weights;
    const float *scales;
    const void *prescale;
    int64_t prescale_step;
} stack;

// x [rows, hidden]; input_bits: as of a linear's; weights: of expert e and row r at e * expert_step + r * row_step; y is
// fp32. groups_in, groups_out: groups of the inputs of fc and up, and of down. `scratch`: rows * (2 * hidden + 3 * inside)
// floats, that of the widest product, and of each thread `rows` integers of 64 bits.
typedef struct {
    int64_t bf16, input_bits;
    const void *x;
    const float *weights;
    float *y;
    int64_t experts, rows, hidden, inside, expert_step, row_step, groups_in, groups_out;
    stack fc, up, down;
} expert_arguments;

// What an expert works in: rows of inputs, of what each linear makes, and for the product itself.
typedef struct {
    float *x, *fc, *up, *gated, *down, *rest;
} work;

INLINE void multiply(const int bf16, long input_bits, const void *x, stack s, long expert, long in, long out,
                     long groups, void *y, long rows, work w, team all) {
    const linear_arguments p = {.bits = 4,
                                .input_bits = input_bits,
                                .bf16_x = bf16,
                                .x = x,
                                .weights = s.weights + expert * in * out / 2,
                                .scales = s.scales + expert * groups * out,
                                .bf16_y = bf16,
                                .y = y,
                                .rows = rows,
                                .in = in,
                                .out = out,
                                .groups = groups};
    linear(&p, w.rest, all);
    wait_for_all(all);
}

// to [count, width] = rows of x, times a prescale where there is one.
INLINE void take_rows(const int bf16, const void *x, const int64_t *rows, long count, long width, stack s, long expert,
                      void *to, team all) {
    for (long i = all.me; i < count; i += all.count)
        for (long k = 0; k < width; k++) {
            const float scale = s.prescale ? get(bf16, s.prescale, expert * s.prescale_step + k) : 1;
            put(bf16, to, i * width + k, get(bf16, x, rows[i] * width + k) * scale);
        }
    wait_for_all(all);
}

// On the `count` rows that chose it.
INLINE void run_expert(const int bf16, const expert_arguments *a, long expert, const int64_t *chosen, long count, work w,
                       team all) {
    take_rows(bf16, a->x, chosen, count, a->hidden, a->fc, expert, w.x, all);
    multiply(bf16, a->input_bits, w.x, a->fc, expert, a->hidden, a->inside, a->groups_in, w.fc, count, w, all);
    if (a->up.prescale != a->fc.prescale)
        take_rows(bf16, a->x, chosen, count, a->hidden, a->up, expert, w.x, all);
    multiply(bf16, a->input_bits, w.x, a->up, expert, a->hidden, a->inside, a->groups_in, w.up, count, w, all);
    for (long i = all.me; i < count; i += all.count)
#pragma omp simd
        for (long k = 0; k < a->inside; k++) {
            const float g = as(bf16, silu(get(bf16, w.fc, i * a->inside + k)));
            const float gated = as(bf16, g * get(bf16, w.up, i * a->inside + k));
            const float scale = a->down.prescale ? get(bf16, a->down.prescale, expert * a->down.prescale_step + k) : 1;
            put(bf16, w.gated, i * a->inside + k, gated * scale);
        }
    wait_for_all(all);
    multiply(bf16, a->input_bits, w.gated, a->down, expert, a->inside, a->hidden, a->groups_out, w.down, count, w, all);
    for (long i = all.me; i < count; i += all.count) {
        const float weight = a->weights[expert * a->expert_step + chosen[i] * a->row_step];
        for (long k = 0; k < a->hidden; k++)
            a->y[chosen[i] * a->hidden + k] += weight * get(bf16, w.down, i * a->hidden + k);
    }
}

int run_experts(const void *arguments, void *scratch, team all) {
    const expert_arguments *a = arguments;
    int64_t *chosen = (int64_t *)scratch + all.me * a->rows;
    work w = {(float *)((int64_t *)scratch + all.count * a->rows)};
    w.fc = w.x + a->rows * a->hidden;
    w.up = w.fc + a->rows * a->inside;
    w.gated = w.up + a->rows * a->inside;
    w.down = w.gated + a->rows * a->inside;
    w.rest = w.down + a->rows * a->hidden;
    for (long row = all.me; row < a->rows; row += all.count) memset(a->y + row * a->hidden, 0, 4 * a->hidden);
    for (long expert = 0; expert < a->experts; expert++) {
        long count = 0;
        for (long row = 0; row < a->rows; row++)
            if (a->weights[expert * a->expert_step + row * a->row_step] != 0) chosen[count++] = row;
        if (!count) continue;
        if (a->bf16)
            run_expert(1, a, expert, chosen, count, w, all);
        else
            run_expert(0, a, expert, chosen, count, w, all);
    }
    return 0;
}
