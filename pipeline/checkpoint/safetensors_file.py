"""Reading and writing .safetensors files, strictly and without loading them.

Ours rather than the `safetensors` library for three reasons: weights are mapped, never copied (also into TensorRT,
which wants a pointer); the writer streams, so that a shard never exists in memory; and a damaged or hostile header is
refused with the file and tensor named (safetensors_header.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.safetensors_header import make_header, read_header
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo
from pipeline.digest import RunningDigest

if TYPE_CHECKING:  # numpy takes a fifth of what `plan` may, which reads headers only
    import numpy as np
    import numpy.typing as npt

CHUNK = 8 << 20  # bytes per write: progress stays smooth, and a mapped file is not held in memory
FLUSH_EVERY = 64 << 20  # bytes between flushes in the background
# The kernel maps a file's cached pages around the one that is touched, behind it too, up to a large folio's size. What
# is let go of piece by piece would leave that much of every piece.
MAPPED_AROUND = 2 << 20


class SafetensorsFile:
    """One file: its header, checked in full on opening, and its tensors as views of a mapping made on first use.

    `tensors` has the header's order, `metadata` its free-form strings. A file must not change while it is open.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the file is not what its header says, down to the last byte."""
        self.path = path
        header = read_header(path)
        self.metadata: Mapping[str, str] = header.metadata
        self.tensors: Mapping[str, TensorInfo] = header.tensors
        self._offsets, self._data_start = header.offsets, header.data_start
        self._map: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Of its tensors, which fill what follows the header."""
        return max((end for _, end in self._offsets.values()), default=0)

    def read(self, name: str) -> RawTensor:
        """The tensor's bytes, without a copy unless they lie misaligned for their type. Raises KeyError."""
        import numpy as np

        info, (begin, end) = self.tensors[name], self._offsets[name]
        if begin == end:
            return RawTensor(info.dtype, info.shape, np.empty(0, np.uint8))
        start = self._data_start + begin
        data: npt.NDArray[np.uint8] = np.frombuffer(self._mapping(), np.uint8, end - begin, start)
        if start % DTYPES[info.dtype][0]:
            data = data.copy()
        return RawTensor(info.dtype, info.shape, data)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Lets go of the resident pages of the tensor's bytes [begin, end), and of those just before, which a read of
        these has mapped again; they are read again where used again."""
        if self._map is None:
            return
        start, stop = (self._data_start + offset for offset in self._offsets[name])
        first = max(0, start + begin - MAPPED_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
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
    Another thread digests each piece while it is written, which spares reading the file again; `digest` is the file's.
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo], *, metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        header = make_header(infos, metadata)
        self._written = 0
        self._total = sum(info.nbytes for info in infos)
        self._unflushed = 0
        self._digest = RunningDigest()
        self._digester = ThreadPoolExecutor(1)
        self._flusher = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed in __exit__)
        try:
            self._put(header)
        except BaseException as error:  # nobody enters what was not made
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def write(self, data: npt.NDArray[Any]) -> None:
        """Appends a contiguous array's bytes."""
        import numpy as np

        self._put(data.reshape(-1).view(np.uint8).data if data.size else b"")
        self._written += data.nbytes
        self._unflushed += data.nbytes
        if self._unflushed >= FLUSH_EVERY and (self._flush is None or self._flush.done()):
            self._collect_flush()
            self._flush = self._flusher.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0

    @property
    def digest(self) -> str:
        """Of everything written so far, as `pipeline.digest.digest_file` gives it."""
        return self._digest.spell()

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
            self._digester.shutdown()
            self._flusher.shutdown()
            self._file.close()
            if not complete:
                self.path.unlink(missing_ok=True)

    def _collect_flush(self) -> None:
        if self._flush is not None:
            self._flush.result()  # raises what the disk refused

    def _put(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        digested = self._digester.submit(self._digest.update, view)
        try:
            while view:
                view = view[self._file.write(view) :]  # a raw file may take less than it is given
        finally:
            digested.result()  # the caller may use the piece's memory again


def write_safetensors(
    path: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[RawTensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors`, which come in the order of `infos` and may be made lazily: one is held at a time.

    Raises ValueError where a tensor is not what its info declares.
    """
    with SafetensorsWriter(path, infos, metadata=metadata) as writer:
        for info, tensor in zip(infos, tensors, strict=True):
            if (tensor.dtype, tensor.shape, tensor.data.nbytes) != (info.dtype, info.shape, info.nbytes):
                raise ValueError(
                    f"{path}: {info.name} is {tensor.dtype}{list(tensor.shape)} of {tensor.data.nbytes} bytes, "
                    f"declared {info.dtype}{list(info.shape)} of {info.nbytes}"
                )
            for start in range(0, tensor.data.nbytes, CHUNK):
                writer.write(tensor.data[start : start + CHUNK])
