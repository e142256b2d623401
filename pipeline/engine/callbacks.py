"""What TensorRT calls during a build: log, progress and output, told on to the parent process."""

from __future__ import annotations

import json
import os
import time
from typing import IO, Any

# The phase that takes the time: five steps for every optimization profile.
_COMPILING = "Computing profile costs"


class Events:
    """JSON lines to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: str, **values: Any) -> None:
        os.write(self._descriptor, (json.dumps({"event": event, **values}) + "\n").encode())


class EngineWriter:
    """Writes the stream of a build to a file. `error` keeps what went wrong, since TensorRT swallows exceptions."""

    def __init__(self, file: IO[bytes], events: Events) -> None:
        self.file, self.events = file, events
        self.nbytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Bytes written: fewer than given tell TensorRT to give up."""
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            return 0
        if not self.nbytes:
            self.events.send("phase", item="write", total=0, unit="B")
        self.nbytes += len(data)
        self.events.send("advance", amount=len(data))
        return len(data)


# TensorRT's callback classes can only be subclassed once its module is imported.
def make_logger(trt: Any, log: IO[str], errors: list[str]) -> Any:
    began = time.monotonic()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                errors.append(message)
            if severity <= trt.ILogger.Severity.INFO:
                log.write(f"{time.monotonic() - began:9.3f} {severity.name:8} {message}\n")

    return Logger()


def make_monitor(trt: Any, events: Events) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if phase == _COMPILING:
                events.send("phase", item="compile", total=steps, unit="steps")

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == _COMPILING:
                events.send("advance", amount=1)
            return True

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


def make_stream(trt: Any, writer: EngineWriter) -> Any:
    class Stream(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes, *_: Any) -> int:
            return writer.write(data)

    return Stream()
