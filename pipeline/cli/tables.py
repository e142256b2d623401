"""Plain tables: aligned columns for people, the same text in a terminal and in a log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLOURS = {
    "cached": "green",
    "passed": "green",
    "will run": "yellow",
    "undetermined": "yellow",
    "stale": "yellow",
    "unused": "yellow",
    "warning": "yellow",
    "ok": "green",
    "failed": "red",
    "damaged": "red",
}

MANY = 5  # items that a cell lists


def print_table(rows: Sequence[Sequence[str]], *, indent: int = 2) -> None:
    """Prints rows of equal length. Cells that name a state are coloured; the last column may be long."""
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
    for row in rows:
        text = "  ".join(_style(cell) + " " * (width - len(cell)) for cell, width in zip(row, widths, strict=True))
        click.echo((" " * indent + text).rstrip())


def _style(cell: str) -> str:
    return click.style(cell, fg=COLOURS[cell]) if cell in COLOURS else cell


def print_title(text: str) -> None:
    click.secho(text, bold=True)


def format_bytes(count: float) -> str:
    """Memory in binary units, as GPUs are sized: 85_899_345_920 -> "80.00 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count:.0f} B"


def print_fields(document: Mapping[str, Any], *, indent: int = 0) -> None:
    """Prints nested names and values as lines; a list of records of one kind becomes a table under its column names.

    Values whose name ends in "bytes" are sizes. Records that differ only in a number within their name, as the pools
    of the layers do, share a row.
    """
    margin = " " * indent
    width = max((len(key) for key, value in document.items() if not _is_nested(value)), default=0)
    for key, value in document.items():
        key = _make_printable(key)
        if not _is_nested(value):
            click.echo(f"{margin}{key.ljust(width)}  {_spell(value, key)}")
            continue
        click.secho(f"{margin}{key}", bold=True)
        if isinstance(value, dict):
            print_fields(value, indent=indent + 2)
        else:
            columns = list(dict.fromkeys(name for record in value for name in record))
            rows = [[_spell(record.get(name), name) for name in columns] for record in _fold(value)]
            print_table([columns, *rows], indent=indent + 2)


def _is_nested(value: Any) -> bool:
    return bool(value) and (
        isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, dict) for item in value))
    )


def _fold(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        template = re.sub(r"\d+", "#", str(record["name"])) if "name" in record else str(id(record))
        rest = [(key, value) for key, value in record.items() if key != "name"]
        alike.setdefault(f"{template} {rest}", []).append(record)
    return [
        group[0] if len(group) == 1 else {**group[0], "name": f"{group[0]['name']} to {group[-1]['name']}"}
        for group in alike.values()
    ]


def _spell(value: Any, name: str) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        if name == "shape":
            return " x ".join("?" if size == -1 else str(size) for size in value)
        if len(value) > MANY:
            return f"{', '.join(_spell(item, name) for item in value[: MANY - 1])} and {len(value) - MANY + 1} more"
        return ", ".join(_spell(item, name) for item in value)
    if isinstance(value, int) and name.endswith("bytes"):
        return format_bytes(value)
    return _make_printable(str(value))


def _make_printable(text: str) -> str:
    """What a file says of itself may hold lines, or what a terminal obeys."""
    return text if text.isprintable() else ascii(text)[1:-1]
