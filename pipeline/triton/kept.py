"""A tritonserver as who asked for it sees it: through its keeper."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from pipeline.triton import keeper
from pipeline.triton.errors import ServerError
from pipeline.triton.processes import is_alive


class Kept:
    """One that runs. `pid`: of tritonserver itself."""

    def __init__(self, job: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """`job`: as keeper.py takes it. Raises ServerError where the command cannot be run."""
        self.keeper = subprocess.Popen(
            [sys.executable, keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        commands, answers = self._pipes
        try:
            commands.write(json.dumps(job) + "\n")
            commands.flush()
            answer = answers.readline().strip()
        except BaseException:
            try:
                self._tell(0)  # what it answers is of no use: the process id may be among it
            finally:
                self._close()
            raise
        if not answer.isdigit():
            self._close()
            raise ServerError(f"{job['command'][0]} cannot be run: {answer.removeprefix('error ')}")
        self.pid = int(answer)

    @property
    def running(self) -> bool:
        return self.keeper.poll() is None and is_alive(self.pid)

    def stop(self, seconds: float) -> int | None:
        """Ends it within so many seconds; interrupted, at once. The exit status, 0 for a clean end; None where nobody
        knows it."""
        try:
            answer = self._tell(seconds)
        except BaseException:
            self._tell(0)
            raise
        finally:
            self._close()
        return int(answer) if answer else None

    def _tell(self, seconds: float) -> str:
        commands, answers = self._pipes
        with contextlib.suppress(BrokenPipeError):
            commands.write(f"stop {seconds}\n")
            commands.flush()
        return answers.read().strip()

    def _close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.keeper.wait()

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.keeper.stdin is not None and self.keeper.stdout is not None
        return self.keeper.stdin, self.keeper.stdout
