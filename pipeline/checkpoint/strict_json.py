"""JSON from files that others wrote: no duplicate keys, no NaN, and every failure a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_strict(text: bytes) -> Any:
    """Parses UTF-8 JSON. Raises ValueError for anything else, with position and reason.

    Duplicate keys are refused because readers disagree on which one counts; deep nesting because it exhausts the stack.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} appears twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
