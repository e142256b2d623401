"""BLAKE3 digests of bytes, files and JSON, spelled "blake3:" and 64 hex digits, and a cache of files' digests.

A checkpoint of hundreds of gigabytes is read once to be digested; afterwards its files are recognised by device, inode,
size and modification time. The weakness of that is git's "racy clean" problem (git's Documentation/technical/racy-git):
a file changed twice within the clock's resolution looks unchanged. So a file younger than two seconds is never cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

PREFIX = "blake3:"
RACY_NS = 2_000_000_000
_BUFFER = 1 << 21  # fits a core's cache: larger buffers digest slower

Identity = tuple[int, int, int, int]


class DigestCache:
    """Digests of files by identity, in an append-only file of JSON lines.

    One line is one short O_APPEND write, which several processes may do at once. It ends in its own checksum: a line
    torn by a kill or flipped by a disk is passed over, so damage can do no worse than have a file digested again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[Identity, str] | None = None

    def look_up(self, identity: Identity) -> str | None:
        return self._entries().get(identity)

    def remember(self, identity: Identity, digest: str) -> None:
        """Where the file cannot be written, the digest is known to this process only: it saves time, nothing else."""
        self._entries()[identity] = digest
        with contextlib.suppress(OSError):
            self._append(identity, digest)

    def _append(self, identity: Identity, digest: str) -> None:
        line = json.dumps([*identity, digest, _checksum(identity, digest)]) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # A leading newline ends a line that a killed process left torn; empty lines are passed over.
            os.write(descriptor, b"\n" + line.encode())
        finally:
            os.close(descriptor)

    def _entries(self) -> dict[Identity, str]:
        if self._known is None:
            self._known = {}
            for line in self.path.read_bytes().splitlines() if self.path.is_file() else ():
                entry = _parse_line(line)
                if entry is not None:
                    self._known[entry[0]] = entry[1]
        return self._known


def _parse_line(line: bytes) -> tuple[Identity, str] | None:
    try:
        device, inode, size, mtime, digest, checksum = json.loads(line)
        identity = (int(device), int(inode), int(size), int(mtime))
        return (identity, str(digest)) if checksum == _checksum(identity, digest) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _checksum(identity: Identity, digest: str) -> int:
    return zlib.crc32(f"{identity} {digest}".encode())


_cache: DigestCache | None = None


def set_digest_cache(path: Path | None) -> None:
    """Keeps the digests of files in the file `path` from now on; None turns the cache off."""
    global _cache
    if path is None or _cache is None or _cache.path != path:
        _cache = DigestCache(path) if path else None


def digest_bytes(data: bytes | bytearray | memoryview | npt.NDArray[np.generic]) -> str:
    """The digest of a contiguous buffer's bytes; an array's shape and type do not enter."""
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    view = memoryview(data)  # type: ignore[arg-type]
    if view.nbytes:  # an empty view cannot be cast
        hasher.update(view.cast("B"))
    return PREFIX + str(hasher.hexdigest())


def digest_pieces(pieces: Iterable[npt.NDArray[np.uint8]]) -> str:
    """The digest of contiguous arrays' bytes one after the other: `digest_bytes` of their concatenation."""
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    for piece in pieces:
        if piece.nbytes:
            hasher.update(memoryview(piece).cast("B"))  # type: ignore[arg-type]
    return PREFIX + str(hasher.hexdigest())


class RunningDigest:
    """The digest of bytes that come in pieces, made while something else is done with them."""

    def __init__(self) -> None:
        from blake3 import blake3

        self._hasher = blake3()

    def update(self, piece: memoryview) -> None:
        """Without Python's lock, so that another thread may write the same piece meanwhile."""
        self._hasher.update(piece)

    def spell(self) -> str:
        """Of all that came so far."""
        return PREFIX + str(self._hasher.hexdigest())


def digest_json(value: Any) -> str:
    """The digest of a JSON value in one canonical spelling: sorted keys, no spaces, UTF-8. NaN is a ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return digest_bytes(text.encode())


def digest_file(path: Path, *, cached: bool = True, on_bytes: Callable[[int], None] | None = None) -> str:
    """The digest of a file's content, read as a stream, or from the cache where one is set and knows the file.

    `cached=False` reads the file whatever the cache says. `on_bytes` is told of bytes as they are done with.
    """
    cache = _cache
    if cached and cache is not None:
        status = os.stat(path)
        known = cache.look_up(identify(status))
        if known is not None:
            if on_bytes:
                on_bytes(status.st_size)
            return known
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        digest = _digest_stream(file.readinto, on_bytes)
        after = os.fstat(file.fileno())
    # Cached only where nobody wrote meanwhile, and nobody could still write within the same tick of the clock.
    settled = time.time_ns() - after.st_mtime_ns > RACY_NS
    if cache is not None and settled and identify(before) == identify(after):
        cache.remember(identify(after), digest)
    return digest


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """A file's SHA-256 in hex, as sha256sum writes it: for files that others check. `on_bytes` as of digest_file."""
    import hashlib

    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BUFFER):
            hasher.update(block)
            if on_bytes:
                on_bytes(len(block))
    return hasher.hexdigest()


def cached_digest(path: Path) -> str | None:
    """The digest of a file if it is known without reading the file."""
    return _cache.look_up(identify(os.stat(path))) if _cache is not None else None


def identify(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _digest_stream(readinto: Callable[[memoryview], int | None], on_bytes: Callable[[int], None] | None) -> str:
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_BUFFER))
    while count := readinto(buffer):
        hasher.update(buffer[:count])
        if on_bytes:
            on_bytes(count)
    return PREFIX + str(hasher.hexdigest())
