"""Locks between runs: flock on a file per artifact, so that a killed process gives its locks up by dying.

Whoever makes an artifact holds its lock alone, whoever reads it as an input holds it shared. Locks are taken in the
stages' order, inputs first, so that two runs cannot wait for each other. Lock files are never deleted: a lock on a file
that another process unlinked excludes nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, *, shared: bool, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`; where it must wait, tells `on_wait` once who is in the way ("process 1234").

    On a disk that cannot be written to, a shared lock that was never taken there is not held: nothing can change.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        if not (shared and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)):
            raise
        yield
        return
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            on_wait(f"process {holder}" if holder else "another process")
            fcntl.flock(descriptor, kind)
        if not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Holds the lock file alone if nobody else holds it at all; whether it does."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a read-only disk: others' locks can be seen all the same
