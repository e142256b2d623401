"""Which tokens a choice can fall on when the logits are a little off: where greedy, those near the best; where drawn,
those between whose borders the random number lies, give or take what the borders can have moved.

Logits l, each off by e at most, at temperature T: a weight exp(l / T) is off by a factor within exp(±e / T). A border
is the share of the whole that the tokens before it have: it is lowest where theirs are all too small and the others'
all too large, and without those before it that may not be among the candidates at all.

Shapes: V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.runtime.sampling import Sampling

ROUNDING = 1e-6
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def find_possible(logits: npt.NDArray[np.float32], sampling: Sampling, uniform: float, error: float) -> Bools:
    """[V]: whether a token can be chosen with the random number `uniform`, within (0, 1), from logits each of which is
    off by `error` at most. Of what edits logits before the choice (bias, penalties, words) it knows nothing."""
    scores = logits.astype(np.float64) - float(logits.max())
    error += ROUNDING
    if sampling.is_greedy:
        near: Bools = scores >= -2 * error
        return near
    temperature = sampling.temperature or 1.0
    weights, factor = np.exp(scores / temperature), float(np.exp(error / temperature))
    maybe, surely = _find_candidates(scores, weights, sampling, error, factor)
    low, high = _sum_before(np.where(surely, weights, 0.0)), _sum_before(np.where(maybe, weights, 0.0))
    lowest = _share(low[:-1] / factor, (high[-1] - high[:-1]) * factor)  # of the border before a token
    highest = _share(high[1:] * factor, (low[-1] - low[1:]) / factor)  # of the one after it
    possible: Bools = maybe & (uniform >= lowest - ROUNDING) & (uniform <= highest + ROUNDING)
    return possible


def _find_candidates(
    scores: Floats, weights: Floats, sampling: Sampling, error: float, factor: float
) -> tuple[Bools, Bools]:
    """[V], [V]: whether a token may be among those drawn from, and whether it is among them for sure."""
    order = np.argsort(-scores, kind="stable")
    # How many tokens are better than a token for sure, and how many may be, itself among these.
    surely_better = np.searchsorted(-scores[order], -(scores + 2 * error), side="left")
    maybe_better = np.searchsorted(-scores[order], -(scores - 2 * error), side="right")
    maybe, surely = np.ones(len(scores), bool), np.ones(len(scores), bool)
    if sampling.top_k:
        maybe, surely = surely_better < sampling.top_k, maybe_better <= sampling.top_k
    if 0 < sampling.top_p < 1:
        widest = _sum_before(np.where(maybe, weights, 0.0)[order])
        narrowest = _sum_before(np.where(surely, weights, 0.0)[order])
        least = _share(narrowest[surely_better] / factor, (widest[-1] - widest[surely_better]) * factor)
        others = narrowest[-1] - narrowest[maybe_better] + weights
        most = _share((widest[maybe_better] - weights) * factor, others / factor)
        maybe, surely = maybe & (least <= sampling.top_p + ROUNDING), surely & (most < sampling.top_p - ROUNDING)
    if sampling.min_p:
        lowest = sampling.temperature * float(np.log(sampling.min_p))
        maybe, surely = maybe & (scores >= lowest - 2 * error), surely & (scores > lowest + 2 * error)
    return maybe, surely


def _sum_before(weights: Floats) -> Floats:
    """[V + 1]"""
    return np.concatenate([[0.0], np.cumsum(weights)])


def _share(before: Floats, after: Floats) -> Floats:
    before, after = np.maximum(before, 0.0), np.maximum(after, 0.0)
    share: Floats = before / np.maximum(before + after, np.finfo(np.float64).tiny)
    return share
