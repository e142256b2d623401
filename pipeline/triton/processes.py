"""A server's processes and shared memory, as /proc and /dev/shm show them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.triton.keeper import OWNER, SHARED_MEMORY, remove_unclaimed

PREFIX = "trtseek"  # of the names under /dev/shm
STUB = "triton_python_backend_stub"
RANK = "pipeline.runtime.rank_process"
_OWNER_NAME = re.compile(rf"({PREFIX}_\d+_[0-9a-f]{{8}}_){OWNER}")


def is_alive(pid: int | None) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    state = _read_stat(pid) if pid is not None else None
    return state is not None and state[0] != "Z"


def find_stubs(parent: int) -> dict[int, str]:
    """A server's models by process id, each with its stub's command line: the stubs among its children, and the other
    ranks that a stub leads, without which it is of no use."""
    stubs = {pid: command for pid, command in _list_children(parent) if STUB in command}
    return stubs | {rank: own for pid, own in stubs.items() for rank, command in _list_children(pid) if RANK in command}


def _list_children(parent: int) -> Iterator[tuple[int, str]]:
    """Process id and command line of each that has not ended."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (state := _read_stat(int(entry.name))) and state[1] == parent and state[0] != "Z":
            with contextlib.suppress(OSError):
                command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(entry.name), command.strip()


def remove_remains() -> None:
    """Removes the shared memory and the folders of servers that were killed with their keepers, and nobody else's."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}_*_{OWNER}"):
        if match := _OWNER_NAME.fullmatch(path.name):
            remove_unclaimed(match[1])


def _read_stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process, None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third of proc(5)'s
    return fields[0], int(fields[1])
