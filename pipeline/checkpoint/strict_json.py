"""JSON from files that others wrote: no duplicate keys, no NaN, and every failure a ValueError."""

from __future__ import annotations

import json
from typing import Any

# Brackets, braces and commas in a text, and so about its values: a few bytes each make objects of a few hundred.
MAX_VALUES = 600_000


def parse_strict(text: bytes, *, unique: bool = True, fractions: bool = True) -> Any:
    """Parses UTF-8 JSON. Raises ValueError for anything else, with position and reason.

    Duplicate keys are refused because readers disagree on which one counts, unless `unique` is False; deep nesting
    because it exhausts the stack; more than MAX_VALUES values because they exhaust memory. `fractions` False refuses
    numbers that are not written as integers.
    """
    if len(text) > MAX_VALUES and sum(text.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    decoder = json.JSONDecoder(
        object_pairs_hook=_make_object if unique else None,
        parse_constant=_refuse_constant,
        parse_float=None if fractions else _refuse_fraction,
    )
    try:
        return decoder.decode(text.decode("utf-8"))
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


def _refuse_fraction(text: str) -> Any:
    raise ValueError("a fraction, where there are only integers")
