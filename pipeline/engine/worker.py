"""One build in a process of its own: `python -m pipeline.engine.worker request.json`, started by builder.py.

TensorRT allows one build per process (a failed one poisons those after it), and may need more memory than there is: the
kernel then kills this process, not the pipeline. Tells its parent how it goes in JSON lines on a pipe.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from pipeline.engine.backends import Backend, find_backend
from pipeline.engine.diagnostics import diagnose
from pipeline.engine.limits import BuildLimits
from pipeline.errors import BuildError, StoreError, TrtseekError

_PR_SET_PDEATHSIG = 1
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


def run(request: dict[str, Any], log: IO[str], events: Events) -> None:
    """Builds what the request asks for into request["engine"]. Raises TrtseekError."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.network.inputs import network_inputs
    from pipeline.network.readback import read_network
    from pipeline.network.spec import NetworkSpec

    backend = find_backend(request["backend"])
    backend.check_target(request["sm"])
    trt = backend.load()
    spec = NetworkSpec.from_json(json.dumps(request["spec"]))
    limits = BuildLimits.from_json(request["limits"])
    source = CheckpointFolder.open(Path(request["checkpoint"]))
    errors: list[str] = []
    logger = _make_logger(trt, log, errors)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    events.send("phase", item="lay out the network", total=1, unit="networks")
    try:
        built = _find_factory(request["factory"])(trt, network, spec, source.architecture, source)
        digest = read_network(built).digest()
    except TrtseekError:
        raise
    except Exception as error:  # the bindings raise whatever they like once TensorRT has refused a layer
        log.write(traceback.format_exc())
        raise _refusal(network, [*errors, f"{type(error).__name__}: {error}"]) from error
    events.send("advance", amount=1)
    ports = network_inputs(source.architecture, spec)
    config = _configure(trt, backend, builder, request["sm"], limits, ports, events)
    writer = _compile(trt, builder, network, config, Path(request["engine"]), events, errors)
    events.send(
        "done",
        nbytes=writer.nbytes,
        version=trt.__version__,
        network_digest=digest,
    )


def _configure(
    trt: Any, backend: Backend, builder: Any, sm: int, limits: BuildLimits, ports: Any, events: Events
) -> Any:
    config = builder.create_builder_config()
    backend.set_target(trt, config, sm)
    config.progress_monitor = _make_monitor(trt, events)
    for limit in limits.profiles():
        profile = builder.create_optimization_profile()
        for name, (minimum, optimum, maximum) in limit.shapes(ports).items():
            profile.set_shape(name, minimum, optimum, maximum)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"TensorRT refuses the optimization profile {limit.name}", hint="see the build log, and stages.build"
            )
    return config


def _compile(
    trt: Any, builder: Any, network: Any, config: Any, path: Path, events: Events, errors: list[str]
) -> EngineWriter:
    try:
        with open(path, "wb") as file:
            writer = EngineWriter(file, events)
            succeeded = builder.build_serialized_network_to_stream(network, config, _make_stream(trt, writer))
            if writer.error:
                raise writer.error
            if succeeded:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"{path}: the engine cannot be written: {error.strerror or error}",
            hint="free space on that disk, or choose another output folder",
        ) from error
    if not succeeded or not writer.nbytes:
        raise _refusal(network, errors)
    return writer


def _refusal(network: Any, errors: list[str]) -> BuildError:
    layers = [(layer.name, layer.type.name) for layer in map(network.get_layer, range(network.num_layers))]
    diagnosis = diagnose(errors, layers)
    return BuildError(diagnosis.message, hint=diagnosis.hint)


def _find_factory(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


# TensorRT's callback classes can only be subclassed once its module is imported.
def _make_logger(trt: Any, log: IO[str], errors: list[str]) -> Any:
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


def _make_monitor(trt: Any, events: Events) -> Any:
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


def _make_stream(trt: Any, writer: EngineWriter) -> Any:
    class Stream(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes, *_: Any) -> int:
            return writer.write(data)

    return Stream()


def main(arguments: list[str]) -> int:
    """Runs the request in the file named first, reporting to the file descriptor named second."""
    # Dies with its parent, however that dies: an orphan would go on taking gigabytes for an engine nobody waits for.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    events = Events(int(arguments[1]))
    with open(request["log"], "a", encoding="utf-8", buffering=1) as log:
        try:
            run(request, log, events)
        except TrtseekError as error:
            log.write(f"{error}\n")
            events.send("error", kind=type(error).__name__, message=error.message, hint=error.hint)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
