"""Typed, bounded access to a config.json's keys, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import CheckpointError

MAX_SIZE = 2**24  # of any one dimension; far beyond every model, and products of three still fit 128 bits


class ConfigValues:
    """Settings from the file `origin`. A null value counts as absent. Every method raises CheckpointError."""

    def __init__(self, values: Mapping[str, Any], origin: str, *, prefix: str = "") -> None:
        self.values, self.origin, self.prefix = values, origin, prefix

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.origin}: {self.prefix}{key} {problem}",
            hint="compare the file with the model's own config.json on the hub",
        )

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.fail(key, f"must be an integer from {minimum} to {maximum}, not {spell(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = -math.inf) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not minimum <= value <= 1e30:  # so neither infinity nor NaN
            wanted = "a finite number" if minimum == -math.inf else f"a finite number of at least {minimum:g}"
            raise self.fail(key, f"must be {wanted}, not {spell(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {spell(value)}")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self._get(key, default)
        if value not in allowed:
            raise self.fail(key, f"is {spell(value)}; this architecture reads {', '.join(allowed)}")
        return str(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(key, "is missing")
        return value


def spell(value: Any) -> str:
    """A value for a message, which may come from a hostile file."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "an integer of more than 30 digits"
    return text if len(text) <= 60 else text[:57] + "..."
