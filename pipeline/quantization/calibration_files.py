"""What a config says of a calibration file, and how the file is written: text, JSON lines or chats."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pipeline.errors import QuantizationError

MAX_LINE = 64 << 20  # bytes of JSON: a file without line ends must not be read whole
MAX_DIGITS = 4300  # of a number: Python's own bound, beyond which it takes quadratic time
BLOCK = 1 << 16  # bytes looked through at a time
JSON_LINES = (".jsonl", ".ndjson")
KEYS = {"jsonl": "text", "chat": "messages"}  # where a line's object holds what it is about, unless told
SETTING = "stages.quantize.calibration.files"


class CalibrationFile(Protocol):
    """`format`: "text", "jsonl", "chat", or "auto" (by the file's name, and the first line's keys). `key`: the entry of
    each JSON line (None: KEYS). `weight`: its share of the samples beside other files' weights (None: see `text`)."""

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def weight(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """A CalibrationFile of which nothing but the path was said."""

    path: Path
    format: str = "auto"
    key: str | None = None
    weight: float | None = None


def name_file(file: CalibrationFile | Path) -> CalibrationFile:
    """A CalibrationFile of a bare path."""
    return PlainFile(path=file) if isinstance(file, Path) else file


def guess_format(path: Path, key: str | None) -> str:
    """By the name, and whether the first line that holds anything has a list where messages would be.

    Raises QuantizationError for the name .json.
    """
    if path.suffix.lower() == ".json":
        raise QuantizationError(
            f"{path}: what a .json file holds is to be told",
            hint=f"{SETTING}: [{{path: {path}, format: jsonl}}] or chat, where each line is an object of its own; "
            "text, to take it as it is; of a list, write one object per line in a .jsonl file",
        )
    if path.suffix.lower() not in JSON_LINES:
        return "text"
    with open(path, "rb") as file:
        file.seek(skip_blank(file, 0))
        line = file.readline(MAX_LINE)
    try:
        return "chat" if isinstance(parse_line(line.decode()).get(key or KEYS["chat"]), list) else "jsonl"
    except (UnicodeDecodeError, ValueError, RecursionError):
        return "jsonl"  # whose reader says what is wrong with the line


def skip_blank(file: BinaryIO, start: int) -> int:
    """The first byte from `start` on that is no white space of ASCII, nor a byte order mark; else the file's end."""
    file.seek(start)
    size = 256  # what is blank is short, as a rule
    while block := file.read(size):
        size = BLOCK
        if file.tell() == len(block):  # the file's beginning
            block = block.removeprefix(codecs.BOM_UTF8)
        if left := block.lstrip():
            return file.tell() - len(left)
    return file.tell()


def parse_line(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is no JSON object, but {type(record).__name__}")
    return record


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"holds a number of {len(digits):,} digits: put it in quotes, or leave it out")
    return int(digits)
