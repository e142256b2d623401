"""Runs an attack in a fork that may take 100 MB more than it has and 20 seconds, and says how it ended.

A limit on the address space, not a measurement: it holds for what C and Rust code allocates, too.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOM = 100_000_000
SECONDS = 20


@dataclass(frozen=True)
class Outcome:
    """`kind` is "accepted", the name of the TrtseekError, "crashed" with the traceback, or "killed" with the signal."""

    kind: str
    message: str


def run_caged(attack: Callable[[], object]) -> Outcome:
    """What became of `attack`, called in a child. What is heavy to import must be imported before."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = _attempt(attack)
            os.write(send, f"{outcome.kind}\0{outcome.message}"[:60_000].encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        return Outcome("killed", signal.Signals(-code).name)
    kind, _, message = text.partition("\0")
    return Outcome(kind, message)


def _attempt(attack: Callable[[], object]) -> Outcome:
    from pipeline.errors import TrtseekError

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        attack()
    except TrtseekError as error:
        return Outcome(type(error).__name__, f"{error.message}\n{error.hint}")
    except BaseException:
        return Outcome("crashed", traceback.format_exc())
    return Outcome("accepted", "")


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry below a folder: its inode, size and time. Nothing is followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(parent, name))
            found[os.path.relpath(os.path.join(parent, name), folder)] = (
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
            )
    return found
