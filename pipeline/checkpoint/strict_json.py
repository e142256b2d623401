"""JSON from files that others wrote: no duplicate keys, no NaN; every failure a ValueError, or names the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

# Brackets, braces and commas in a text, and so about its values: a few bytes each make objects of a few hundred.
MAX_VALUES = 600_000
MAX_BYTES = 20 << 20  # of a file; DeepSeek-V3's index takes 9 MB
HINT = "copy the file again from the model"


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


def read_text(path: Path) -> bytes:
    """A JSON file's. Raises CheckpointError with the file's name where it is not there, or larger than MAX_BYTES."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="copy it from the model's own repository")
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, too many for what it should be", hint=HINT)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="check its permissions") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError with the file's name, and the place in it."""
    try:
        value = parse_strict(read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}", hint="copy it again from the model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint=HINT)
    return value


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
