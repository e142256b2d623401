// How kernels are called: by every thread of a team, one call after the other.
#pragma once
#include <sched.h>
#include <stdatomic.h>

enum {
    SPINS = 2000,  // some 50 us: what a thread alone does between products takes less
    SHARES = 8,    // of each thread, at least
};

// Where the threads of a team meet. next: what a kernel shares out by its number.
typedef struct {
    atomic_int arrived, phase;
    atomic_long next, refused;
} meeting;

typedef struct {
    int me, count;
    meeting *place;
} team;

INLINE void wait_for_all(team all) {
    if (all.count == 1) return;
    meeting *place = all.place;
    const int phase = atomic_load(&place->phase);
    if (atomic_fetch_add(&place->arrived, 1) == all.count - 1) {
        atomic_store(&place->arrived, 0);
        atomic_store(&place->phase, phase + 1);
    } else {
        for (int turn = 0; atomic_load(&place->phase) == phase; turn++)
            if (turn >= SPINS) sched_yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
    }
}

// Items go to whoever comes first, some at a time: a thread that sleeps takes as long to wake as many of them. All
// threads open the shares, and each takes the places of their firsts until there is nothing left.
INLINE void open_shares(team all) {
    if (all.me == 0) atomic_store(&all.place->next, 0);
    wait_for_all(all);
}

INLINE long size_share(long items, long most, team all) {
    const long size = items / (SHARES * all.count);
    return size < 1 ? 1 : size < most ? size : most;
}

INLINE long take_share(long size, team all) { return size * atomic_fetch_add(&all.place->next, 1); }

// `arguments`: the struct above the kernel's definition, of integers and addresses, eight bytes each. `scratch`: memory
// to work in. Returns 1, and changes nothing, where it refuses what it was given.
typedef int kernel(const void *arguments, void *scratch, team all);

kernel linear, rms_norm, gate, rotate_into_cache, attend_pages, attend_chunks, multiply_heads, join_rotated;
kernel run_experts, elementwise, copy, reduce, score_rows, top, one_hot, pick;
