"""Locks between runs: flock on a file per artifact, so that a killed process gives its locks up by dying.

Whoever makes an artifact holds its lock alone, whoever reads it as an input holds it shared. Locks are taken in the
stages' order, inputs first, so that two runs cannot wait for each other. Lock files are never deleted: a lock on a file
that another process unlinked excludes nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, *, shared: bool, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`; where it must wait, tells `on_wait` once who is in the way ("process 1234")."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
