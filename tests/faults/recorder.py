"""Counts a run's events and kills its process with SIGKILL at the one it was given.

*Events* are every open for writing, rename, link, unlink, folder made or removed (Python's own audit events), every
fsync and every report of progress. Nothing of the product knows of it. Nothing waits for a disk: a process that is
killed, unlike a machine that loses power, loses nothing that it wrote.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

AUDITED = ("os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Recorder:
    """A reporter that counts events, keeps a log of notes and outcomes, and dies at event number `death`."""

    def __init__(self, log: Path, death: int | None) -> None:
        self.log, self.death, self.count, self.stage = log, death, 0, ""
        self.busy = False

    def begin(self, stage: str) -> None:
        self.stage = stage
        self.strike()

    def end(self, outcome: str) -> None:
        self.write(f"{self.stage}: {outcome}")
        self.strike()

    def start(self, item: str, total: float, unit: str) -> None:
        self.strike()

    def advance(self, amount: float) -> None:
        self.strike()

    def note(self, message: str) -> None:
        self.write(f"{self.stage}: {message}")
        self.strike()

    def write(self, line: str) -> None:
        self.busy = True
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)
        self.busy = False

    def strike(self) -> None:
        self.count += 1
        if self.count == self.death:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy:
            return
        if event in AUDITED or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            if event == "open" and str(arguments[0]).endswith(".safetensors"):
                self.write(f"started {self.stage} {Path(str(arguments[0])).name}")
            self.strike()

    def watch(self) -> None:
        sys.addaudithook(self.audit)

        def fsync(descriptor: int) -> None:
            self.strike()
            os.fstat(descriptor)  # refuses what fsync would refuse
            self.strike()

        os.fsync = fsync  # type: ignore[assignment]  # in this process only
