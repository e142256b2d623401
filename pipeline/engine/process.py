"""The build's child process, seen from its parent: started, followed, its failures explained, its memory measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeline.errors
from pipeline.errors import BuildError, TrtseekError
from pipeline.progress import Progress, format_amount

_POLL_S = 0.2


@dataclass(slots=True)
class WorkerRun:
    """What the worker told, and what was seen of it. Bytes are the process's: `peak_bytes` counts mapped weight files,
    which the kernel can drop; `peak_anonymous_bytes`, sampled, does not."""

    result: dict[str, Any]
    error: dict[str, Any] | None = None
    phase: str = "start"
    peak_bytes: int = 0
    peak_anonymous_bytes: int = 0


def run_worker(request: dict[str, Any], *, needed: int, log: Path, progress: Progress) -> WorkerRun:
    """Runs pipeline.engine.worker on a request to its end. `needed`: memory the build takes, bytes, for messages.

    Raises what the worker failed with, BuildError where it died. The child never outlives this call.
    """
    receive, send = os.pipe()
    with open(log, "ab") as log_file, os.fdopen(receive, "rb", buffering=0) as pipe:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "pipeline.engine.worker", str(send)],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(send,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            os.close(send)
        run = WorkerRun(result={})
        try:
            _send(request, child)
            for event in _read_events(pipe.fileno(), child.pid, run):
                _follow(event, run, progress)
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:  # Ctrl-C above all: nobody waits for this engine any more
            child.kill()
            child.wait()
            raise
    child.returncode = os.waitstatus_to_exitcode(status)  # wait4 took the status that Popen would look for
    run.peak_bytes = usage.ru_maxrss * 1024
    if child.returncode or not run.result:
        raise _explain_failure(child.returncode, run, needed, log)
    return run


def _send(request: dict[str, Any], child: subprocess.Popen[bytes]) -> None:
    """On its standard input: a file would stay where this process is killed."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # why it ended, its status says
        child.stdin.write(json.dumps(request).encode())


def read_kilobytes(path: Path, key: str) -> int:
    """A "Key:  123 kB" line of a /proc file, in bytes; 0 where there is none (the process may be gone)."""
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _read_events(descriptor: int, pid: int, run: WorkerRun) -> Iterator[dict[str, Any]]:
    """The worker's events until it closes the pipe; samples its memory meanwhile."""
    pending = b""
    status = Path(f"/proc/{pid}/status")
    while True:
        ready, _, _ = select.select([descriptor], [], [], _POLL_S)
        run.peak_anonymous_bytes = max(run.peak_anonymous_bytes, read_kilobytes(status, "RssAnon"))
        if not ready:
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from map(json.loads, lines)


def _follow(event: dict[str, Any], run: WorkerRun, progress: Progress) -> None:
    kind = event.pop("event")
    if kind == "phase":
        run.phase = event["item"]
        progress.start(event["item"], event["total"], event["unit"])
    elif kind == "advance":
        progress.advance(event["amount"])
    elif kind == "error":
        run.error = event
    elif kind == "done":
        run.result = event


def _explain_failure(code: int, run: WorkerRun, needed: int, log: Path) -> TrtseekError:
    if run.error:
        kind = getattr(pipeline.errors, run.error["kind"], BuildError)
        error: TrtseekError = kind(run.error["message"], hint=run.error["hint"] or f"TensorRT's log: {log}")
        return error
    if code == -signal.SIGKILL:
        return BuildError(
            f"the build process was killed during {run.phase!r}, most likely for lack of memory: it held "
            f"{format_amount(run.peak_anonymous_bytes, 'B')} and needs about {format_amount(needed, 'B')}",
            hint="free memory or add swap; `dmesg` names what the kernel killed",
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return BuildError(f"the build process ended {how} during {run.phase!r}", hint=f"its last words are in {log}")
