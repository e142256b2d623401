// One call after the other, by one team of threads: between two of them nothing sleeps and nobody is called back.
#include <omp.h>
#include <stdint.h>

#include "vectors.h"

#include "calls.h"

enum { MOST_ARGUMENTS = 28 };

typedef struct {
    int64_t function, shared;  // shared: by the team's threads; else the first does it alone
    void *scratch;
    int64_t arguments[MOST_ARGUMENTS];
} call;

static kernel *const kernels[] = {
    linear,       rms_norm,    gate,        rotate_into_cache, attend_pages, attend_chunks, multiply_heads,
    join_rotated, run_experts, elementwise, copy,              reduce,       score_rows,    top,
    one_hot,      pick,
};

// Returns the number of the call that was refused, after which none is made, or `count`.
long run(const call *calls, long count, int threads) {
    meeting place = {.refused = count};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const team all = {omp_get_thread_num(), omp_get_num_threads(), &place}, alone = {0, 1, &place};
        for (long i = 0; i < count; i++) {
            const call *c = calls + i;
            // Of two calls that the first thread makes alone it need not be waited for. Nothing follows a refusal; but
            // another thread may be at the next call already, and refuse it.
            if ((c->shared || all.me == 0) && place.refused >= i &&
                kernels[c->function](c->arguments, c->scratch, c->shared ? all : alone))
                place.refused = i;
            if (!c->shared && i + 1 < count && !c[1].shared) continue;
            wait_for_all(all);
            if (place.refused <= i) break;
        }
    }
    return place.refused;
}
