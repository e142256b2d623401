"""Calibration files as documents: lines of plain text, texts out of JSON lines, chat transcripts.

A document is what one line of a file holds, so a file can be entered at any byte: its first whole line is the next one.
Nothing reads more of a file than the lines that are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from pipeline.quantization.chat import ChatTemplate

MAX_LINE = 64 << 20  # bytes: a file without line ends must not be read whole
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


class Documents:
    """The documents of one file. Raises QuantizationError, naming file, line and key, for what cannot be read."""

    def __init__(self, file: CalibrationFile, template: ChatTemplate) -> None:
        self.path, self.template = file.path, template
        self.format = file.format if file.format != "auto" else _guess_format(file.path)
        self.key = file.key or KEYS.get(self.format, "")
        readers: dict[str, Callable[[str], str]] = {"jsonl": self._read_json, "chat": self._read_chat}
        self._read = readers.get(self.format, str)

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def read(self, start: int = 0) -> Iterator[tuple[int, str]]:
        """Each document from the first line that begins at or after byte `start`, with the byte after it."""
        with open(self.path, "rb") as file:
            if start:
                file.seek(start - 1)
                file.readline(MAX_LINE)  # the rest of the line before, or just its end
            while line := self._read_line(file):
                if document := self._decode(line, file.tell() - len(line)):
                    yield file.tell(), document

    def _read_line(self, file: BinaryIO) -> bytes:
        begin = file.tell()
        line = file.readline(MAX_LINE)
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise self._refuse(begin, f"is longer than {MAX_LINE >> 20} MiB")
        return line

    def _decode(self, line: bytes, begin: int) -> str:
        try:
            text = line.decode()
            document = self._read(text) if self.format == "text" or text.strip() else ""
            document.encode()  # JSON can spell half a character
            return document
        except (UnicodeError, ValueError, RecursionError) as error:
            raise self._refuse(begin, str(error)) from error

    def _refuse(self, begin: int, problem: str) -> QuantizationError:
        hints = {
            "text": f"{SETTING} names UTF-8 text files",
            "jsonl": f'every line holds an object with the text under a key: {SETTING}: [{{path: …, key: "text"}}]',
            "chat": 'every line holds an object like {"messages": [{"role": "user", "content": "…"}, …]}',
        }
        return QuantizationError(
            f"{self.path}:{_count_lines(self.path, begin) + 1}: {problem}", hint=hints[self.format]
        )

    def _read_json(self, line: str) -> str:
        text = self._find(line)
        if not isinstance(text, str):
            raise ValueError(f'"{self.key}" holds no text, but {type(text).__name__}')
        return text + "\n\n"

    def _read_chat(self, line: str) -> str:
        messages = self._find(line)
        if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
            raise ValueError(f'"{self.key}" is no list of messages')
        return self.template.render(messages)

    def _find(self, line: str) -> Any:
        record = _parse(line)
        if self.key not in record:
            raise ValueError(f'there is no key "{self.key}" (there is {", ".join(map(repr, record)) or "none"})')
        return record[self.key]


def _guess_format(path: Path) -> str:
    if path.suffix.lower() not in JSON_LINES:
        return "text"
    with open(path, "rb") as file:
        line = file.readline(MAX_LINE)
    try:
        return "chat" if KEYS["chat"] in _parse(line.decode()) else "jsonl"
    except (UnicodeDecodeError, ValueError, RecursionError):
        return "jsonl"  # whose reader says what is wrong with the line


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is no JSON object, but {type(record).__name__}")
    return record


def _count_lines(path: Path, end: int) -> int:
    """Line ends before byte `end`; only read for an error's sake."""
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(end, 1 << 20))):
            count += data.count(b"\n")
            end -= len(data)
    return count
