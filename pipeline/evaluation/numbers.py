"""Numbers in reports."""

from __future__ import annotations

import math
from typing import Any

SPELLED = ("nan", "inf", "-inf")


def spell_numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: in its place stands text, so that a failed proof has its report, too."""
    if isinstance(value, dict):
        return {key: spell_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_numbers(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_numbers(value: Any) -> Any:
    """What was spelled so, as numbers again, of what holds no texts that could be one of them."""
    if isinstance(value, dict):
        return {key: read_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_numbers(item) for item in value]
    return float(value) if value in SPELLED else value
