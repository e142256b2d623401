"""Reading and writing .safetensors files, strictly and without loading them.

Ours rather than the `safetensors` library for three reasons: weights are mapped, never copied (also into TensorRT,
which wants a pointer); the writer streams, so that a shard never exists in memory; and a damaged or hostile header is
refused with the file and tensor named. The format: 8 bytes little-endian header length N, N bytes of JSON that maps
each name to {dtype, shape, data_offsets [begin, end)}, then the data (README of github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.strict_json import parse_strict
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo
from pipeline.errors import CheckpointError

MAX_HEADER = 100_000_000  # the reference implementation's own limit
MAX_ELEMENTS = 2**62  # beyond this, strides overflow in what reads the tensor later
CHUNK = 8 << 20  # bytes per write: progress stays smooth, and a mapped file is not held in memory
FLUSH_EVERY = 64 << 20  # bytes between flushes in the background
DAMAGED = "the file is damaged or was cut short; download or copy it again"
METADATA = "__metadata__"


class SafetensorsFile:
    """One file: its header, checked in full on opening, and its tensors as views of a mapping made on first use.

    `tensors` has the header's order, `metadata` its free-form strings. A file must not change while it is open.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the file is not what its header says, down to the last byte."""
        self.path = path
        header, self._data_start, size = _read_header(path)
        metadata = header.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            _fail(path, f"{METADATA} must map names to strings")
        self.metadata: dict[str, str] = metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            self.tensors[name], self._offsets[name] = _parse_entry(path, name, entry)
        _check_coverage(path, self._offsets, size - self._data_start)
        self._map: mmap.mmap | None = None

    def read(self, name: str) -> RawTensor:
        """The tensor's bytes, without a copy unless they lie misaligned for their type. Raises KeyError."""
        info, (begin, end) = self.tensors[name], self._offsets[name]
        if begin == end:
            return RawTensor(info.dtype, info.shape, np.empty(0, np.uint8))
        start = self._data_start + begin
        data: npt.NDArray[np.uint8] = np.frombuffer(self._mapping(), np.uint8, end - begin, start)
        if start % DTYPES[info.dtype][0]:
            data = data.copy()
        return RawTensor(info.dtype, info.shape, data)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Lets go of the resident pages of the tensor's bytes [begin, end); they are read again where used again."""
        if self._map is None:
            return
        start, stop = (self._data_start + offset for offset in self._offsets[name])
        first = (start + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        last = stop if end is None else start + end
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map


class SafetensorsWriter:
    """Writes one file as a stream: the header first, then every tensor's bytes in the order of `infos`, in any pieces.

    A context manager. Leaving it checks that exactly the declared bytes were written (ValueError otherwise: a mistake
    of the caller) and flushes to the disk; a file left by an exception is deleted. While the caller makes the next
    bytes, a thread has the last ones written out: the kernel alone would start seconds later, or at the final flush.
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo], *, metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        header = _make_header(infos, metadata)
        self._written = 0
        self._total = sum(info.nbytes for info in infos)
        self._unflushed = 0
        self._flusher = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed in __exit__)
        self._put(header)

    def write(self, data: npt.NDArray[Any]) -> None:
        """Appends a contiguous array's bytes."""
        self._put(data.reshape(-1).view(np.uint8).data if data.size else b"")
        self._written += data.nbytes
        self._unflushed += data.nbytes
        if self._unflushed >= FLUSH_EVERY and (self._flush is None or self._flush.done()):
            self._collect_flush()
            self._flush = self._flusher.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = False
        try:
            if kind is None:
                if self._written != self._total:
                    raise ValueError(f"{self.path}: {self._written} bytes written, {self._total} declared")
                self._collect_flush()
                os.fsync(self._file.fileno())
                complete = True
        finally:
            self._flusher.shutdown()
            self._file.close()
            if not complete:
                self.path.unlink(missing_ok=True)

    def _collect_flush(self) -> None:
        if self._flush is not None:
            self._flush.result()  # raises what the disk refused

    def _put(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]  # a raw file may take less than it is given


def write_safetensors(
    path: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[RawTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Writes `tensors`, which come in the order of `infos` and may be made lazily: one is held at a time.

    `on_bytes` is told of bytes as they are written. Raises ValueError where a tensor is not what its info declares.
    """
    with SafetensorsWriter(path, infos, metadata=metadata) as writer:
        for info, tensor in zip(infos, tensors, strict=True):
            if (tensor.dtype, tensor.shape, tensor.data.nbytes) != (info.dtype, info.shape, info.nbytes):
                raise ValueError(
                    f"{path}: {info.name} is {tensor.dtype}{list(tensor.shape)} of {tensor.data.nbytes} bytes, "
                    f"declared {info.dtype}{list(info.shape)} of {info.nbytes}"
                )
            for start in range(0, tensor.data.nbytes, CHUNK):
                piece = tensor.data[start : start + CHUNK]
                writer.write(piece)
                if on_bytes:
                    on_bytes(piece.nbytes)


def _make_header(infos: Sequence[TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
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
        raise ValueError(f"a header of {len(text)} bytes exceeds the format's {MAX_HEADER}; write more, smaller shards")
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data starts, and the file's size. Reads nothing but the header."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        _fail(path, "is not a regular file", hint="a checkpoint's shards are files, or links to files")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                _fail(path, f"{size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER or length > size - 8:
                _fail(path, f"its header claims {length} bytes, the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="check the path and its permissions") from error
    if len(text) != length:
        _fail(path, f"its header was cut short at {len(text)} of {length} bytes")
    try:
        header = parse_strict(text)
    except ValueError as error:
        _fail(path, f"its header is not valid JSON: {error}")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    return header, 8 + length, size


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    if not name.isprintable():  # nor can it be put into a message
        _fail(path, f"the tensor name {name!a} holds characters that are no text")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"the header's entry for {name} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _fail(path, f"{name} has type {dtype!r}; types read: {', '.join(DTYPES)}", hint="convert the checkpoint first")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        _fail(path, f"{name} has shape {shape!r}, which is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        _fail(path, f"{name} has data_offsets {offsets!r}, which are not two positions")
    if math.prod(n for n in shape if n) > MAX_ELEMENTS:
        _fail(path, f"{name} has shape {shape}: too many elements")
    info = TensorInfo(name, dtype, tuple(shape))
    begin, end = offsets
    if end - begin != info.nbytes:
        _fail(path, f"{name} is {dtype}{shape}, which takes {info.nbytes} bytes; its data_offsets span {end - begin}")
    return info, (begin, end)


def _check_coverage(path: Path, offsets: Mapping[str, tuple[int, int]], size: int) -> None:
    """Tensors must follow one another without overlap or hole and end where the file ends."""
    position, previous = 0, "the start"
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin != position:
            what = "overlaps" if begin < position else f"leaves {begin - position} bytes unused after"
            _fail(path, f"{name} {what} {previous}")
        position, previous = end, name
    if position != size:
        _fail(path, f"its tensors take {position} bytes, {size} follow the header")


def _fail(path: Path, problem: str, *, hint: str = DAMAGED) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}", hint=hint)
