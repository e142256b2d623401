"""One option for each of many units, at the least total value within a total cost: the multiple-choice knapsack.

Solved by dynamic programming over the cost, in steps fine enough that rounding up costs little, then improved by single
exchanges within what is left (Kellerer, Pferschy, Pisinger: Knapsack Problems, ch. 11).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STEPS = 20_000


def select(costs: Sequence[Sequence[float]], values: Sequence[Sequence[float]], limit: float) -> list[int] | None:
    """The option of each unit; None where even the cheapest options cost more than `limit`.

    Exact where costs are whole numbers and the room above the cheapest options is at most STEPS.
    """
    least = [min(row) for row in costs]
    room = limit - sum(least)
    if room < 0:
        return None
    extra = [np.asarray(row, dtype=np.float64) - low for row, low in zip(costs, least, strict=True)]
    is_whole = all((row == np.round(row)).all() for row in extra)
    step = 1.0 if is_whole and room <= STEPS else max(room / STEPS, 1e-300)
    size = int(room / step)
    best = np.zeros(size + 1)  # by steps of cost used at most
    picks = np.zeros((len(extra), size + 1), dtype=np.int16)
    for unit, row in enumerate(extra):
        found = np.full(size + 1, np.inf)
        for option, cost in enumerate(row):
            used = int(np.ceil(cost / step - 1e-9))
            if used > size:
                continue
            value = np.full(size + 1, np.inf)
            value[used:] = best[: size + 1 - used] + values[unit][option]
            better = value < found
            found[better], picks[unit][better] = value[better], option
        best = found
    chosen, at = [0] * len(extra), size
    for unit in reversed(range(len(extra))):
        chosen[unit] = int(picks[unit][at])
        at -= int(np.ceil(extra[unit][chosen[unit]] / step - 1e-9))
    _exchange(chosen, extra, values, room)
    return chosen


def _exchange(
    chosen: list[int], extra: Sequence[npt.NDArray[np.float64]], values: Sequence[Sequence[float]], room: float
) -> None:
    """Takes, as long as there is one, the exchange of one option that gains the most for its cost."""
    while True:
        left = room - sum(row[option] for row, option in zip(extra, chosen, strict=True))
        gains = [
            (gain / max(cost, 1e-12), unit, option)
            for unit, now in enumerate(chosen)
            for option in range(len(values[unit]))
            if (gain := values[unit][now] - values[unit][option]) > 0
            and (cost := extra[unit][option] - extra[unit][now]) <= left
        ]
        if not gains:
            return
        _, unit, option = max(gains)
        chosen[unit] = option
