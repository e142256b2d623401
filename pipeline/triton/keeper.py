"""Keeps one tritonserver: a process between it and who asked for it, so that nothing of it is ever left behind.

    python keeper.py  < commands          (it needs nothing but the standard library)

The first line of standard input is the job as JSON. "stop SECONDS" ends the server gracefully, within so many seconds,
which another such line may cut short; and so does the end of the input: whoever asked for the server may be killed, and
then cannot clean up. Whatever the server leaves (stubs that
outlive it, their shared memory, the folder it was started over) is ended and removed. Printed are the server's process
id, and at last the status. Meanwhile a process that the server waits in vain to see the end of is ended (Overdue).

Whose all that is, a lock says, not a process id: it holds across containers that share a host's /dev/shm, and for a
server that still answers its last requests after whoever asked for it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

SHARED_MEMORY = Path("/dev/shm")
# Ends the name of a file beside a server's shared memory, which holds the name of its folder, and is locked while any
# process of it lives.
OWNER = "owner"
FOLDER = "trtseek-triton-"  # begins the names of the folders that servers are started over
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S, _KILL_S = 0.1, 10.0
# How often it is looked, and how long a process may take to end once the server wants nothing else of it.
_LOOK_S, _OVERDUE_S = 1.0, 5.0
# The number of the system call wait4, by machine.
_WAIT4 = {"x86_64": 61, "aarch64": 260}.get(os.uname().machine)


def main() -> None:
    # Unbuffered: what is there to be read, select sees.
    commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    job = json.loads(commands.readline())
    # Ctrl-C and a terminal that closes reach the whole foreground: it is for who asked to say when the server ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Orphaned stubs become children of this process, which can then wait for their end.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        owner = claim(job["shared_memory_prefix"], job["folder"])
        with open(job["log"], "ab") as log:
            child = subprocess.Popen(
                job["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=job["start_in"],
                preexec_fn=_restore_signals,
                pass_fds=(owner,),
            )
    except OSError as error:
        print(f"error {error}", flush=True)
        return
    try:
        print(child.pid, flush=True)
        _wait_for_end(child, commands, job["grace"])
    finally:
        _kill_group(child.pid)
        shutil.rmtree(job["folder"], ignore_errors=True)
        remove_shared_memory(job["shared_memory_prefix"])
    with contextlib.suppress(BrokenPipeError):
        print(child.returncode, flush=True)


def claim(prefix: str, folder: str) -> int:
    """Says that shared memory of this prefix, and the folder, are in use, until every process that has the returned
    file open is gone."""
    path = SHARED_MEMORY / f"{prefix}{OWNER}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.write(descriptor, os.fsencode(folder))
                return descriptor
        os.close(descriptor)  # a remover took it for a dead one's before it was locked


def remove_unclaimed(prefix: str) -> None:
    """Removes what a server of this user's left whose processes are all gone; nothing of one that has any."""
    path = SHARED_MEMORY / f"{prefix}{OWNER}"
    with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError), open(path, "rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(owner.fileno()).st_uid != os.getuid():
            return  # anybody may write there, and name a folder that is not theirs
        folder = Path(os.fsdecode(owner.read()))
        if folder.is_absolute() and folder.name.startswith(FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
        remove_shared_memory(prefix)


def remove_shared_memory(prefix: str) -> list[str]:
    """Removes what stubs left under /dev/shm, and returns the names. What says whose it is goes last."""
    removed = []
    files = [path for path in SHARED_MEMORY.glob(f"{prefix}*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == f"{prefix}{OWNER}"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path.name)
    return removed


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait_for_end(child: subprocess.Popen[bytes], commands: IO[bytes], grace: float) -> None:
    """Until the server has ended: by itself, or because it was told to and its time is over. `grace`: the seconds that
    it has when the input ends."""
    deadline, is_open, overdue = math.inf, True, Overdue(child.pid)
    while child.poll() is None and time.monotonic() < deadline:
        ready, _, _ = select.select([commands] if is_open else [], [], [], _POLL_S)
        if not ready:
            overdue.look(time.monotonic())
            continue
        command, seconds = commands.readline(), grace
        if command:
            seconds = float(command.split()[1])
        is_open = bool(command)
        if deadline == math.inf:
            child.terminate()
        deadline = min(deadline, time.monotonic() + seconds)
    if child.poll() is None:
        child.kill()
        child.wait()


class Overdue:
    """Ends the children of `server` whose end it has waited for too long.

    Triton 24.10 gives a stub up whose process gets no processor for a second while its model is loaded (it is "not
    healthy"), and then waits for its end without telling it, for ever; the stub waits for orders. On a busy machine one
    start in three stood still so. Killed, the stub is reported as one that failed, and its model can be loaded again.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._since: dict[int, float] = {}  # by process id, of those waited for when it was looked last
        self._looked = -math.inf

    def look(self, now: float) -> None:
        """`now`: of time.monotonic(). To be called often."""
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        self._since = {child: self._since.get(child, now) for child in find_awaited(self._server)}
        for child, since in self._since.items():
            if now - since >= _OVERDUE_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def find_awaited(process: int) -> set[int]:
    """The children, by process id, that a thread of the process waits in wait4 to see the end of. Nothing is known of a
    process that may not be traced: then there are none."""
    found = set()
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError, ValueError), open(f"{thread.path}/syscall") as file:
                call, argument = file.read().split()[:2]  # "running", or the call's number and arguments
                if int(call) == _WAIT4 and 0 < (child := int(argument, 16)) < 1 << 31:
                    found.add(child)
    return found


def _kill_group(group: int) -> None:
    """Ends every process of the server's group, and waits for it."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    main()
