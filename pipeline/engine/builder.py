"""Building an engine: checks, the worker's run, and engine and description put in place together.

The engine appears under its name only when it is whole: streamed beside it, synced, inspected, renamed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.digest import digest_file
from pipeline.engine.backends import find_backend
from pipeline.engine.build_memory import build_memory
from pipeline.engine.description import (
    BuildRecord,
    EngineDescription,
    ProfileDescription,
    ShapeRange,
    TensorDescription,
    read_plugin,
)
from pipeline.engine.engine_file import EngineFile, inspect_engine
from pipeline.engine.limits import FULL, STRIPPED, BuildLimits
from pipeline.engine.process import run_worker
from pipeline.engine.refit_list import REFIT_LIST, load_refit_list
from pipeline.errors import BuildError
from pipeline.host_memory import free_memory
from pipeline.network.inputs import Port, network_inputs, network_outputs
from pipeline.network.spec import NetworkSpec
from pipeline.progress import SILENT, Progress, format_amount

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder

NETWORK_FACTORY = "pipeline.network.network:build_network"


def build_engine(
    *,
    backend: str,
    checkpoint: Path,
    spec: NetworkSpec,
    limits: BuildLimits,
    sm: int,
    output: Path,
    log: Path,
    progress: Progress = SILENT,
    weights: str = FULL,
    weight_streaming: bool = False,
    factory: str = NETWORK_FACTORY,
) -> EngineDescription:
    """Builds `output` (an .engine file) and engine.json beside it from an engine checkpoint.

    sm: the target's compute capability, 80 for 8.0. log: TensorRT's messages, appended. weights: "full", or "stripped",
    which leaves them to a refit and writes refit.json; weight_streaming lets a runner keep weights in host memory.
    factory: "module:function" with build_network's signature, for full weights. Raises BuildError with TensorRT's own
    words and the layer's name where it refuses the network, CheckpointError where the checkpoint cannot be read,
    StoreError where the disk is full.
    """
    from pipeline.checkpoint.folder import CheckpointFolder

    find_backend(backend).check_target(sm)
    source = CheckpointFolder.open(checkpoint)
    output.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    refit_list = output.with_name(f".{REFIT_LIST}.partial")
    request = {
        "backend": backend,
        "checkpoint": str(checkpoint.resolve()),
        "spec": json.loads(spec.to_json()),
        "limits": limits.to_json(),
        "sm": sm,
        "engine": str(partial),
        "refit_list": str(refit_list) if weights == STRIPPED else None,
        "weight_streaming": weight_streaming,
        "log": str(log),
        "factory": factory,
    }
    needed = build_memory(source.architecture, source.nbytes, weights)
    _warn_about_memory(needed, progress)
    began = time.monotonic()
    try:
        run = run_worker(request, needed=needed, log=log, progress=progress)
        record = BuildRecord(
            seconds=round(time.monotonic() - began, 3),
            peak_bytes=run.peak_bytes,
            peak_anonymous_bytes=run.peak_anonymous_bytes,
        )
        inputs = network_inputs(source.architecture, spec)
        outputs = network_outputs(source.architecture, spec)
        engine = inspect_engine(partial) if find_backend(backend).HAS_READABLE_FILES else None
        if engine:
            _check_engine(engine, sm, limits, (*inputs, *outputs))
        description = EngineDescription(
            file=output.name,
            nbytes=partial.stat().st_size,
            digest=digest_file(partial),
            backend=backend,
            backend_version=run.result["version"],
            sm=sm,
            network_digest=run.result["network_digest"],
            spec=spec,
            limits=limits,
            inputs=tuple(map(_describe_port, inputs)),
            outputs=tuple(map(_describe_port, outputs)),
            profiles=_describe_profiles(limits, inputs, engine),
            weights_bytes=_count_weights(engine, refit_list) if engine else None,
            sources=_digest_sources(source),
            build=record,
            weights=weights,
            weight_streaming=weight_streaming,
            plugins=tuple(map(read_plugin, run.result["plugins"])),
        )
        _put_in_place(partial, output, refit_list, description)
    finally:
        partial.unlink(missing_ok=True)
        refit_list.unlink(missing_ok=True)
    return description


def _warn_about_memory(needed: int, progress: Progress) -> None:
    available = free_memory()
    if available < needed:
        progress.note(
            f"the build needs about {format_amount(needed, 'B')} of memory, {format_amount(available, 'B')} are free"
        )


def _check_engine(engine: EngineFile, sm: int, limits: BuildLimits, ports: Sequence[Port]) -> None:
    """Raises BuildError where the engine file contradicts what was asked for: never serve what was not asked."""
    found = {(tensor.name, tensor.dtype, len(tensor.shape)) for tensor in engine.tensors}
    wanted = {(port.name, port.dtype, len(port.axes)) for port in ports}
    problems = {
        f"targets {engine.targets}, not SM{sm}": engine.targets != (sm,),
        f"has {len(engine.profiles)} profiles, not {len(limits.profiles())}": len(engine.profiles)
        != len(limits.profiles()),
        f"differs in its inputs and outputs: {sorted(found ^ wanted)}": found != wanted,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BuildError(f"the engine that TensorRT wrote {problem}", hint="report this with the build log")


def _count_weights(engine: EngineFile, refit_list: Path) -> int:
    """Bytes of weights on the GPU: those in the file, and those that a refit brings."""
    return engine.weights_bytes + (load_refit_list(refit_list).nbytes if refit_list.exists() else 0)


def _describe_port(port: Port) -> TensorDescription:
    return TensorDescription(name=port.name, dtype=port.dtype, shape=port.shape)


def _describe_profiles(
    limits: BuildLimits, inputs: Sequence[Port], engine: EngineFile | None
) -> tuple[ProfileDescription, ...]:
    return tuple(
        ProfileDescription(
            name=profile.name,
            phase=profile.phase,
            shapes={
                name: ShapeRange(minimum=minimum, optimum=optimum, maximum=maximum)
                for name, (minimum, optimum, maximum) in profile.shapes(inputs).items()
            },
            workspace_bytes=engine.profiles[index].workspace_bytes if engine else None,
            kernels=engine.profiles[index].graph.kernels if engine else {},
        )
        for index, profile in enumerate(limits.profiles())
    )


def _digest_sources(source: CheckpointFolder) -> dict[str, str]:
    """What decides the network: the architecture and the weights, not the tokenizer."""
    files = [path for path in source.files if path.name == "config.json" or path.suffix == ".safetensors"]
    return {path.name: digest_file(path) for path in files}


def _put_in_place(partial: Path, output: Path, refit_list: Path, description: EngineDescription) -> None:
    """The description last: an engine without one is not finished."""
    beside = output.with_name("engine.json")
    temporary = output.with_name(".engine.json.partial")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(description.to_json())
        file.flush()
        os.fsync(file.fileno())
    beside.unlink(missing_ok=True)
    os.replace(partial, output)
    if description.weights == STRIPPED:
        os.replace(refit_list, output.with_name(REFIT_LIST))
    else:
        output.with_name(REFIT_LIST).unlink(missing_ok=True)
    os.replace(temporary, beside)
