"""Numbers as a reader wants them. What is not finite comes as text, and stays it."""

from __future__ import annotations

from typing import Any


def spell_number(value: Any, digits: str) -> str:
    return value if isinstance(value, str) else format(value, digits)


def spell_share(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.1%}"


def spell_bytes(count: float) -> str:
    """Decimal prefixes, as disks are sold."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {prefix}B"
    return f"{count:.0f} B"


def spell_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
