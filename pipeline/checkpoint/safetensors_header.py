"""Reading the header of a .safetensors file: what it says, checked in full, and nothing else of the file.

The format: 8 bytes little-endian header length N, N bytes of JSON that maps each name to {dtype, shape, data_offsets
[begin, end)}, then the data (README of github.com/huggingface/safetensors).

DeepSeek-V3 has 91,000 tensors, and `plan` answers at once: a header as every writer makes it is checked in one cheap
pass. Where anything in it is out of the ordinary the careful pass looks again, and accepts it or says what is wrong.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.checkpoint.strict_json import parse_strict
from pipeline.checkpoint.tensors import DTYPES, TensorInfo
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Bytes: some 60,000 tensors in one file. The reference implementation allows 100 MB, which takes a gigabyte to parse.
MAX_HEADER = 10_000_000
MAX_ELEMENTS = 2**62  # beyond this, strides overflow in what reads the tensor later
DAMAGED = "the file is damaged or was cut short; download or copy it again"
LFS = b"version https://git-lfs.github.com/spec/v1"  # how a file begins that stands for the one to be pulled
METADATA = "__metadata__"
KEYS = {"dtype", "shape", "data_offsets"}

Offsets = tuple[int, int]
Tables = tuple[dict[str, TensorInfo], dict[str, Offsets]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`tensors` in the header's order, `offsets` of their data from `data_start`, `metadata` its free-form strings."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, Offsets]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Raises CheckpointError where the file is not what its header says, down to the last byte."""
    text, room = _read_text(path)
    entries = _parse_quickly(text)
    metadata = entries.pop(METADATA, {}) if entries is not None else {}
    tables = _read_plainly(entries, metadata, text, room) if entries is not None else None
    if tables is None:
        metadata, tables = _read_carefully(path, text, room)
    tensors, offsets = tables
    return Header(tensors=tensors, offsets=offsets, metadata=metadata, data_start=8 + len(text))


def _read_text(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and the number of bytes after it."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        _fail(path, "is not a regular file", hint="a checkpoint's shards are files, or links to files")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                _fail(path, f"{size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8 and (prefix + file.read(len(LFS))).startswith(LFS):
                _fail(path, "is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in its repository")
            if length > size - 8:
                _fail(path, f"its header claims {length} bytes, the file has {size}")
            if length > MAX_HEADER:
                _fail(path, f"its header has {length} bytes; read are up to {MAX_HEADER}", hint="write smaller shards")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="check the path and its permissions") from error
    if len(text) != length:
        _fail(path, f"its header was cut short at {len(text)} of {length} bytes")
    return text, size - 8 - length


def _parse_quickly(text: bytes) -> dict[str, Any] | None:
    """The header as JSON, or None where only the careful pass may judge it: fractions, truth values and escapes, which
    no header needs, too many values, or no JSON object at all."""
    if any(sign in text for sign in (b"\\", b"true", b"false")):
        return None
    try:
        entries = parse_strict(text, unique=False, fractions=False)
    except ValueError:
        return None
    return entries if isinstance(entries, dict) else None


class _Sizes(dict[tuple[str, tuple[int, ...]], int]):
    """Bytes of a tensor by (type, shape), computed once each. KeyError, TypeError or ValueError for what has none."""

    def __missing__(self, key: tuple[str, tuple[int, ...]]) -> int:
        dtype, shape = key
        if min(shape, default=0) < 0 or math.prod(size for size in shape if size) > MAX_ELEMENTS:
            raise ValueError
        self[key] = math.prod(shape) * DTYPES[dtype][0]
        return self[key]


def _read_plainly(entries: Mapping[str, Any], metadata: Any, text: bytes, room: int) -> Tables | None:
    """Tensors one after the other in the header's order, without a key twice; None for anything else.

    Whole columns at a time, which is four times as fast as entry by entry.
    """
    try:
        if not all(isinstance(value, str) for value in metadata.values()):
            return None
        # Without escapes every string has two quotes. A key that was given twice has lost one, and its value. As many
        # strings as there must be: then no entry has more than its three keys, and no list is an object.
        strings = 5 * len(entries) + (1 + 2 * len(metadata) if metadata else 0)
        objects = 1 + len(entries) + (1 if metadata else 0)
        if text.count(b'"') != 2 * strings or text.count(b"{") != objects or not "".join(entries).isprintable():
            return None
        if not entries:
            return ({}, {}) if room == 0 else None
        dtypes, listed, offsets = zip(*map(itemgetter("dtype", "shape", "data_offsets"), entries.values()), strict=True)
        begins, ends = zip(*offsets, strict=True)
        shapes = list(map(tuple, listed))
        sizes = map(_Sizes().__getitem__, zip(dtypes, shapes, strict=True))
        places = tuple(accumulate(sizes, initial=0))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if begins != places[:-1] or ends != places[1:] or places[-1] != room:
        return None
    infos = map(TensorInfo._make, zip(entries, dtypes, shapes, strict=True))
    return dict(zip(entries, infos, strict=True)), dict(zip(entries, offsets, strict=True))


def _read_carefully(path: Path, text: bytes, room: int) -> tuple[dict[str, str], Tables]:
    try:
        header = parse_strict(text)
    except ValueError as error:
        _fail(path, f"its header is not valid JSON: {error}")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, f"{METADATA} must map names to strings")
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, Offsets] = {}
    for name, entry in header.items():
        tensors[name], offsets[name] = _parse_entry(path, name, entry)
    _check_coverage(path, offsets, room)
    return metadata, (tensors, offsets)


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, Offsets]:
    if not name.isprintable():  # nor can it be put into a message
        _fail(path, f"the tensor name {_spell(name)} holds characters that are no text")
    if not isinstance(entry, dict) or entry.keys() != KEYS:
        _fail(path, f"the header's entry for {name} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        read = ", ".join(DTYPES)
        _fail(path, f"{name} has type {_spell(dtype)}; types read: {read}", hint="convert the checkpoint first")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        _fail(path, f"{name} has shape {_spell(shape)}, which is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        _fail(path, f"{name} has data_offsets {_spell(offsets)}, which are not two positions")
    if _count_elements(shape) > MAX_ELEMENTS:
        _fail(path, f"{name} has shape {_spell(shape)}: too many elements")
    info = TensorInfo(name, dtype, tuple(shape))
    begin, end = offsets
    if end - begin != info.nbytes:
        span = _spell(end - begin)
        _fail(path, f"{name} is {dtype}{_spell(shape)}, which takes {info.nbytes} bytes; its data_offsets span {span}")
    return info, (begin, end)


def _count_elements(shape: list[int]) -> int:
    """The product of the sizes that are not zero, given up on beyond MAX_ELEMENTS: sizes may have a thousand digits."""
    count = 1
    for size in shape:
        count *= size or 1
        if count > MAX_ELEMENTS:
            break
    return count


def _check_coverage(path: Path, offsets: Mapping[str, Offsets], size: int) -> None:
    """Tensors must follow one another without overlap or hole and end where the file ends."""
    position, previous = 0, "the start"
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin != position:
            what = "overlaps" if begin < position else f"leaves {begin - position} bytes unused after"
            _fail(path, f"{name} {what} {previous}")
        position, previous = end, name
    if position != size:
        _fail(path, f"its tensors take {position} bytes, {size} follow the header")


def make_header(infos: Sequence[TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """The bytes that a file of these tensors, one after the other, begins with. ValueError for what no reader takes."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for info in infos:
        if info.name in entries or info.name == METADATA:
            raise ValueError(f"tensor name {info.name} is used twice or reserved")
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data then starts on an 8-byte boundary
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes exceeds {MAX_HEADER}; write more, smaller shards")
    return struct.pack("<Q", len(text)) + text


def _spell(value: Any) -> str:
    """A value of a hostile file, for a message."""
    try:
        text = ascii(value)
    except ValueError:  # integers of thousands of digits
        return "too large a number"
    return text if len(text) <= 100 else text[:97] + "..."


def _fail(path: Path, problem: str, *, hint: str = DAMAGED) -> NoReturn:
    # Names are as long as whoever wrote them likes.
    raise CheckpointError(f"{path}: {problem if len(problem) <= 1000 else problem[:997] + '...'}", hint=hint)
