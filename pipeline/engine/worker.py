"""One build in a process of its own: `python -m pipeline.engine.worker DESCRIPTOR < request`, started by process.py.

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
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, Any

from pipeline.checkpoint.layouts.scales import BLOCK_SCALES
from pipeline.engine.backends import Backend, find_backend
from pipeline.engine.callbacks import EngineWriter, Events, make_logger, make_monitor, make_stream
from pipeline.engine.diagnostics import diagnose
from pipeline.engine.limits import BuildLimits
from pipeline.engine.refit_list import RefitList
from pipeline.errors import BuildError, StoreError, TrtseekError

_PR_SET_PDEATHSIG = 1
# Builder flags: for weights that a refit brings, each under its own name; for weights that may stay on the host.
STRIPPED = ("STRIP_PLAN", "REFIT_INDIVIDUAL")
STREAMED = ("WEIGHT_STREAMING",)


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
    logger = make_logger(trt, log, errors)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    try:
        built = _lay_out(request, trt, network, spec, source, events)
        digest = read_network(built).digest()
    except TrtseekError:
        raise
    except Exception as error:  # the bindings raise whatever they like once TensorRT has refused a layer
        log.write(traceback.format_exc())
        raise _refusal(network, [*errors, f"{type(error).__name__}: {error}"]) from error
    if request["refit_list"]:
        constants = tuple(built.placeholders.values())
        _write_refit_list(Path(request["refit_list"]), RefitList(network_digest=digest, constants=constants))
    ports = network_inputs(source.architecture, spec)
    config = _configure(trt, backend, builder, request, limits, ports, events)
    plugins = _carry_kernels(trt, built, config, request["sm"], events) if built.plugins else []
    if any(name.endswith(BLOCK_SCALES) for name in source.tensors):
        # Otherwise weights in FP8 blocks are dequantized all at once, beside each other, on streams of their own: their
        # 16-bit forms then take as much workspace as the model in 16 bits would have taken memory.
        config.max_aux_streams = 0
    writer = _compile(trt, builder, network, config, Path(request["engine"]), events, errors)
    events.send(
        "done",
        nbytes=writer.nbytes,
        version=trt.__version__,
        network_digest=digest,
        plugins=plugins,
    )


def _lay_out(request: dict[str, Any], trt: Any, network: Any, spec: Any, source: Any, events: Events) -> Any:
    """The network, filled. Without weights, each is read once for its digest, and none is held."""
    if not request["refit_list"]:
        events.send("phase", item="lay out the network", total=1, unit="networks")
        built = _find_factory(request["factory"])(trt, network, spec, source.architecture, source)
        events.send("advance", amount=1)
        return built
    from pipeline.network.network import build_stripped_network

    total = sum(info.nbytes for info in source.tensors.values())
    events.send("phase", item="digest the weights", total=total, unit="B")
    return build_stripped_network(
        trt,
        network,
        spec,
        source.architecture,
        source,
        on_bytes=lambda nbytes: events.send("advance", amount=nbytes),
    )


def _carry_kernels(trt: Any, built: Any, config: Any, sm: int, events: Events) -> list[dict[str, Any]]:
    """Compiles the plugins' kernels, which travel in the engine → what engine.json says of them. Plugins that write to
    the pools need a preview feature of TensorRT's."""
    from plugins.compiler import choose_sm
    from plugins.passed import describe_kernels
    from plugins.tensorrt_plugin import carry

    events.send("phase", item="compile the plugins' kernels", total=1, unit="kernels")
    carried = choose_sm(sm)
    carry(built.plugins.values(), [carried])
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    events.send("advance", amount=1)
    counts = Counter(plugin.operation for plugin in built.plugins.values())
    return [
        {"operation": operation.NAME, "layers": count, "kernels": describe_kernels(operation, carried)}
        for operation, count in counts.items()
    ]


def _write_refit_list(path: Path, refit: RefitList) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(refit.to_json())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, "the refit list", error) from error


def _configure(
    trt: Any, backend: Backend, builder: Any, request: dict[str, Any], limits: BuildLimits, ports: Any, events: Events
) -> Any:
    config = builder.create_builder_config()
    backend.set_target(trt, config, request["sm"])
    for flag in (*(STRIPPED if request["refit_list"] else ()), *(STREAMED if request["weight_streaming"] else ())):
        config.set_flag(getattr(trt.BuilderFlag, flag))
    config.progress_monitor = make_monitor(trt, events)
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
            succeeded = builder.build_serialized_network_to_stream(network, config, make_stream(trt, writer))
            if writer.error:
                raise writer.error
            if succeeded:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, "the engine", error) from error
    if not succeeded or not writer.nbytes:
        raise _refusal(network, errors)
    return writer


def _unwritable(path: Path, what: str, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: {what} cannot be written: {error.strerror or error}",
        hint="free space on that disk, or choose another output folder",
    )


def _refusal(network: Any, errors: list[str]) -> BuildError:
    layers = [(layer.name, layer.type.name) for layer in map(network.get_layer, range(network.num_layers))]
    diagnosis = diagnose(errors, layers)
    return BuildError(diagnosis.message, hint=diagnosis.hint)


def _find_factory(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str]) -> int:
    """Runs the request on standard input, reporting to the file descriptor of the given number."""
    # Dies with its parent, however that dies: an orphan would go on taking gigabytes for an engine nobody waits for.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    events = Events(int(arguments[0]))
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
