"""Bars that figures are held against. One is missed only where all that it compares was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FLAT = 0.10  # growth of peak memory from the smallest size to the largest


def hold_best(what: str, bar: float, figures: Mapping[str, float], names: Sequence[str]) -> bool:
    """Prints whether the smallest figure of `names` is at most `bar`; False where it is not, and none is missing."""
    best = min((figures[name] for name in names if name in figures), default=math.inf)
    missing = [name for name in names if name not in figures]
    if best > bar and missing:
        print(f"  {what} at most {bar:g}: not measured ({', '.join(missing)})")
        return True
    print(f"  {what} at most {bar:g}: {best:.3f}, {'met' if best <= bar else 'MISSED'}")
    return best <= bar


def hold_flat(peaks: Mapping[str, Sequence[int]]) -> bool:
    """Prints by how much the peak memory of each work grew over its sizes; False where one's did by more than FLAT."""
    held = True
    for work, measured in peaks.items():
        if len(measured) < 2:
            print(f"{work}: growth of peak memory not measured: one size")
            continue
        growth = max(measured) / min(measured) - 1
        print(f"{work}: peak memory within {growth:.1%} over all sizes (bar {FLAT:.0%})")
        held &= growth <= FLAT
    return held
