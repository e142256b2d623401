"""What makes a file no text of UTF-8, told by its name, line and byte. Loads no library: `validate` looks, too."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

BLOCK = 1 << 20  # bytes looked through at a time
KINDS = {  # by how a file that is no text begins
    b"\x1f\x8b": "is compressed (gzip): unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd): unpack it",
    b"PK\x03\x04": "is compressed (zip): unpack it",
    b"PAR1": "is Parquet: convert it to JSON lines, or to text",
    codecs.BOM_UTF16_LE: "is UTF-16: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16: convert it to UTF-8",
}
NULS = "holds NUL bytes (byte {}): is it UTF-16?"


def find_fault(file: Path, most: int = sys.maxsize) -> str | None:
    """Why the file is no text of UTF-8, as far as its first `most` bytes show: its name, line and byte."""
    fault = _locate_fault(file, most)
    if fault is None:
        return None
    with open(file, "rb") as text:
        begin = text.read(max(map(len, KINDS)))
    for magic, kind in KINDS.items():
        if begin.startswith(magic):
            return f"{file} {kind}"
    where, problem = fault
    return f"{file}:{count_lines(file, where) + 1}: {problem}"


def _locate_fault(file: Path, most: int) -> tuple[int, str] | None:
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with open(file, "rb") as text:
        while True:
            block, cut = text.read(min(BLOCK, most - at)), len(decoder.getstate()[0])
            if (where := block.find(b"\0")) >= 0:
                return at + where, NULS.format(at + where)
            try:
                decoder.decode(block, final=not block and at < most)  # the last character may be cut at `most`
            except UnicodeDecodeError as error:
                where = at - cut + error.start
                return where, f"is not UTF-8 (byte {where}: {error.reason})"
            if not block:
                return None
            at += len(block)


def count_lines(file: Path, end: int) -> int:
    """Line ends before byte `end`; only read for an error's sake."""
    count = 0
    with open(file, "rb") as data:
        while end > 0 and (block := data.read(min(end, BLOCK))):
            count += block.count(b"\n")
            end -= len(block)
    return count
