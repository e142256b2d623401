"""Numbers in reports."""

from __future__ import annotations

import math
from typing import Any


def spell_numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: in its place stands text, so that a failed proof has its report, too."""
    if isinstance(value, dict):
        return {key: spell_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_numbers(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
