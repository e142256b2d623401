"""Calibration files as documents: lines of plain text, texts out of JSON lines, chat transcripts.

A document is what one line of a file holds, so a file can be entered at any byte, and a long document, too. Nothing
reads more of a file than the lines that are asked for; of plain text, whose lines may have no end, only parts of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.checkpoint.text_faults import NULS, count_lines
from pipeline.errors import QuantizationError
from pipeline.quantization.calibration_files import (
    BLOCK,
    KEYS,
    MAX_LINE,
    SETTING,
    CalibrationFile,
    guess_format,
    parse_line,
    skip_blank,
)
from pipeline.quantization.messages import SHAREGPT, is_sharegpt

if TYPE_CHECKING:
    from pipeline.quantization.chat import ChatTemplate

PART = 1 << 16  # characters of a long document, or bytes of plain text, given at a time
CHECKED, SEARCHED = 1 << 16, 1 << 20  # bytes that a check reads, and that it seeks a first document in


class Documents:
    """The documents of one file. Raises QuantizationError, naming file, line and key, for what cannot be read."""

    def __init__(self, file: CalibrationFile, template: ChatTemplate) -> None:
        self.path, self.template = file.path, template
        self.format = file.format if file.format != "auto" else guess_format(file.path, file.key)
        if self.format == "text" and file.key is not None:
            raise QuantizationError(
                f"{file.path}: key: {file.key} is for JSON lines, and the file is read as plain text",
                hint=f"add format: jsonl or chat to it in {SETTING}, or leave the key out",
            )
        self.key = file.key or KEYS.get(self.format, "")
        readers: dict[str, Callable[[str], str]] = {"jsonl": self._read_json, "chat": self._read_chat}
        self._read = readers.get(self.format, _read_text)
        self._long: tuple[int, int, str] | None = None  # begin, end and text of the last document longer than a part

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def read(self, start: int = 0, *, part: int = PART) -> Iterator[tuple[int, str]]:
        """Each document from about byte `start` on, with the byte to go on at.

        Of JSON the first is the one that `start` lies in: whole, or from the same share of its text on if it has more
        than `part` characters, as any such comes in parts. Plain text begins with the next line, or word, or character,
        within `part` bytes. Reading on from a byte that was given repeats nothing.
        """
        if start >= self.nbytes:
            return
        with open(self.path, "rb") as file:
            begin = self._enter_text(file, start, part) if self.format == "text" else self._find_line(file, start)
            while True:
                if self._long is not None and self._long[0] == begin:
                    _, end, document = self._long
                else:
                    file.seek(begin)
                    line = self._read_line(file, part)
                    if not line:
                        return
                    end, document = begin + len(line), self._decode(line, begin)
                    if self.format != "text" and line.isspace():
                        end = skip_blank(file, end)  # of many blank lines, each takes a while
                yield from self._cut(document, begin, end, start, part)
                begin = end

    def check(self) -> None:
        """Reads the first documents as `read` does. Refuses a blank file, too, and one that has none in SEARCHED bytes
        and is no longer."""
        found = False
        with open(self.path, "rb") as file:
            first = begin = skip_blank(file, 0)
            file.seek(begin)
            while begin - first < (CHECKED if found else SEARCHED) and (line := self._read_line(file, PART)):
                found = bool(self._decode(line, begin).strip()) or found
                begin += len(line)
                file.seek(begin)
        if not found and begin >= self.nbytes:
            raise QuantizationError(f"{self.path} holds no text", hint=f"{SETTING} names files of text")

    def _cut(self, document: str, begin: int, end: int, start: int, part: int) -> Iterator[tuple[int, str]]:
        """The document of the line from byte `begin` to `end`, as `read` gives it."""
        length, nbytes = len(document), end - begin
        if length <= part or self.format == "text":
            if document:
                yield end, document
            return
        self._long = begin, end, document
        at = _find_space(document, -(-(start - begin) * length // nbytes), part) if start > begin else 0
        while at < length:
            stop = _find_space(document, at + part // 2, part // 2)
            # Rounded up, as `at` is: what begins there is behind what was given.
            yield begin + -(-stop * nbytes // length), document[at:stop]
            at = stop

    def _find_line(self, file: BinaryIO, start: int) -> int:
        """The beginning of the line that byte `start` lies in."""
        if self._long is not None and self._long[0] <= start < self._long[1]:
            return self._long[0]
        stop = start
        while stop > 0:
            block = max(0, stop - BLOCK)
            file.seek(block)
            found = file.read(stop - block).rfind(b"\n")
            if found >= 0:
                return block + found + 1
            if start - block > MAX_LINE:
                raise self._refuse(block, f"is longer than {MAX_LINE >> 20} MiB")
            stop = block
        return 0

    @staticmethod
    def _enter_text(file: BinaryIO, start: int, part: int) -> int:
        """The first place from byte `start` on, within `part` bytes, where a line begins, else a word, or character."""
        if start == 0:
            return 0
        file.seek(start - 1)
        ahead = file.read(part)
        if (found := ahead.find(b"\n")) >= 0:
            return start + found
        if (found := ahead.find(b" ", 1)) >= 0:
            return start - 1 + found
        return start + next((i for i, byte in enumerate(ahead[1:]) if byte & 0xC0 != 0x80), len(ahead))

    def _read_line(self, file: BinaryIO, part: int) -> bytes:
        """The next line, of plain text at most `part` bytes of it."""
        begin, most = file.tell(), part if self.format == "text" else MAX_LINE
        line = file.readline(most)
        if len(line) < most or line.endswith(b"\n"):
            return line
        if self.format == "text":
            return _drop_cut_character(line)
        raise self._refuse(begin, f"is longer than {MAX_LINE >> 20} MiB")

    def _decode(self, line: bytes, begin: int) -> str:
        try:
            if (nul := line.find(b"\0")) >= 0:
                raise ValueError(NULS.format(begin + nul))
            text = line.decode()
            if begin == 0:
                text = text.removeprefix("\ufeff")
            document = self._read(text) if self.format == "text" or text.strip() else ""
            document.encode()  # JSON can spell half a character
            if "\0" in document:
                raise ValueError("its text holds NUL characters (\\u0000)")
            return document
        except UnicodeDecodeError as error:
            raise self._refuse(begin, f"is not UTF-8 (byte {begin + error.start}: {error.reason})") from error
        except (UnicodeError, ValueError, RecursionError) as error:
            raise self._refuse(begin, str(error)) from error

    def _refuse(self, begin: int, problem: str) -> QuantizationError:
        hints = {
            "text": f"{SETTING} names UTF-8 text files",
            "jsonl": f'every line holds an object with the text under a key: {SETTING}: [{{path: …, key: "text"}}]; '
            'of chats {"messages": [{"role": "user", "content": "…"}, …]}, format: chat',
            "chat": 'every line holds an object like {"messages": [{"role": "user", "content": "…"}, …]}',
        }
        return QuantizationError(f"{self.path}:{count_lines(self.path, begin) + 1}: {problem}", hint=hints[self.format])

    def _read_json(self, line: str) -> str:
        text = self._find(parse_line(line))
        if not isinstance(text, str):
            raise ValueError(f'"{self.key}" holds no text, but {type(text).__name__}')
        return text + "\n\n" if text.strip() else ""

    def _read_chat(self, line: str) -> str:
        record = parse_line(line)
        messages, tools = self._find(record), record.get("tools")
        if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
            raise ValueError(f'"{self.key}" is no list of messages')
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
            raise ValueError('"tools" is no list of objects')
        return self.template.render(messages, tools)

    def _find(self, record: dict[str, Any]) -> Any:
        if self.key not in record:
            of_sharegpt = SHAREGPT if is_sharegpt(record.get("conversations")) else ""
            there = ", ".join(map(repr, record)) or "none"
            raise ValueError(f'there is no key "{self.key}" (there is {there}){of_sharegpt}')
        return record[self.key]


def _read_text(line: str) -> str:
    """With CR LF as one line end."""
    return line.replace("\r\n", "\n")


def _find_space(text: str, start: int, within: int) -> int:
    """The first line's or word's end from character `start` on, within so many; else `start` itself."""
    for mark in ("\n", " "):
        found = text.find(mark, start, start + within)
        if found >= 0:
            return found
    return min(start, len(text))


def _drop_cut_character(line: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(line)
    except UnicodeDecodeError:
        return line  # refused by who decodes it
    return line[: len(line) - len(decoder.getstate()[0])]
