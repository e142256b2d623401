"""Random numbers by place, not by turn: what (seed, sequence, step) draws does not depend on who else draws.

Philox 4x32 with 10 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
ROUNDS = 10


def philox(counter: Words, key: Words) -> Words:
    """counter [4, n] and key [2, n], 32-bit words held in uint64 → [4, n] random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> HALF) ^ c1 ^ k0, product1 & LOW, (product0 >> HALF) ^ c3 ^ k1, product0 & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack((c0, c1, c2, c3))


def draw_uniforms(seeds: Words, sequences: Words, steps: Words) -> npt.NDArray[np.float64]:
    """One number within (0, 1) for each of n places: seeds of 64 bits, sequence and step below 2**32."""
    zero = np.zeros_like(steps)
    words = philox(np.stack((steps, sequences, zero, zero)), np.stack((seeds & LOW, seeds >> HALF)))
    bits = (words[0] << HALF | words[1]) >> np.uint64(12)
    uniforms: npt.NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniforms
