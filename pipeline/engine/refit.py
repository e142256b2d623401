"""Brings the weights to an engine that was built without: on the GPU host, from the engine checkpoint, as a stream.

The network's own writer makes the constants again, one at a time, each compared by digest with refit.json. Not yet run
on hardware: everything up to the calls of TensorRT's Runtime and Refitter is tested.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engine.description import DESCRIPTION, EngineDescription, load_description
from pipeline.engine.limits import FULL, STRIPPED
from pipeline.engine.refit_list import RefitList, load_refit_list
from pipeline.engine.refitter import Spool, WeightBringer, check_constant
from pipeline.errors import BuildError
from pipeline.progress import SILENT, Progress

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import RawTensor, TensorSource
    from pipeline.network.placeholders import Placeholder
    from pipeline.network.spec import NetworkSpec


def check_refit(folder: Path, checkpoint: Path, progress: Progress = SILENT) -> RefitList:
    """Makes every constant that the engine in `folder` lacks, and compares it with what the engine was built for. Needs
    no GPU. Raises as `refit_engine` does."""
    description, wanted = _open(folder)
    by_name = {constant.name: constant for constant in wanted.constants}
    seen: set[str] = set()

    def visit(placeholder: Placeholder, _: RawTensor) -> None:
        check_constant(by_name.get(placeholder.name), placeholder)
        seen.add(placeholder.name)

    _make_constants(_load(description), description.spec, checkpoint, visit, wanted, progress)
    absent = sorted(by_name.keys() - seen)
    if absent:
        raise BuildError(f"{len(absent)} weights of the engine were not made, {absent[0]} among them")
    return wanted


def refit_engine(folder: Path, checkpoint: Path, output: Path, progress: Progress = SILENT) -> EngineDescription:
    """Writes the engine of `folder` with its weights, and its engine.json, into the new folder `output`.

    Raises BuildError where there is no such GPU here or TensorRT refuses, CheckpointError where the checkpoint is
    another one, StoreError where the disk is too small. Host memory: the finished engine, which TensorRT hands out in
    one piece, and the largest constant.
    """
    from pipeline.digest import digest_file
    from pipeline.workspace import FolderWorkspace, flush

    description, wanted = _open(folder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(f"{output} exists and is not empty", hint="name a new folder")
    _check_gpu(description)
    output.mkdir(parents=True, exist_ok=True)
    # The engine itself, and at worst every constant on its way.
    FolderWorkspace(output, journal=output / ".journal").require(2 * wanted.nbytes + description.nbytes)
    trt = _load(description)
    logger = trt.Logger(trt.Logger.WARNING)
    if description.spec.lowering.plugins():
        from plugins.tensorrt_plugin import register_plugins

        register_plugins(trt)  # an engine finds its plugins among those that are known when it is loaded
    engine = trt.Runtime(logger).deserialize_cuda_engine((folder / description.file).read_bytes())
    if engine is None:
        raise BuildError(f"{folder / description.file} cannot be loaded on this GPU", hint="TensorRT said why above")
    with Spool(output) as spool:
        bringer = WeightBringer(trt, trt.Refitter(engine, logger), wanted, spool)
        _make_constants(trt, description.spec, checkpoint, bringer, wanted, progress)
        bringer.finish()
    path, partial = output / description.file, output / f".{description.file}.partial"
    progress.start("write", 1, "engines")
    with open(partial, "wb") as file:
        file.write(memoryview(_serialize(trt, engine)))
    flush(partial)
    partial.replace(path)
    full = replace(description, nbytes=path.stat().st_size, digest=digest_file(path), weights=FULL)
    (output / DESCRIPTION).write_text(full.to_json(), encoding="utf-8")
    flush(output / DESCRIPTION)
    progress.advance(1)
    return full


def _open(folder: Path) -> tuple[EngineDescription, RefitList]:
    description = load_description(folder)
    if description.weights != STRIPPED:
        raise BuildError(f"{folder / description.file} has its weights", hint="only engines built without take a refit")
    wanted = load_refit_list(folder)
    if wanted.network_digest != description.network_digest:
        raise BuildError(f"{folder}: engine.json and refit.json are of two networks", hint="build the engine again")
    if not (folder / description.file).is_file():
        raise BuildError(f"{folder / description.file} is missing", hint="engine.json names it")
    return description, wanted


def _load(description: EngineDescription) -> Any:
    from pipeline.engine.backends import find_backend

    return find_backend(description.backend).load()


def _check_gpu(description: EngineDescription) -> None:
    from pipeline.engine.tensorrt import list_device_sms

    present = sorted(set(list_device_sms()))
    if description.sm not in present:
        found = ", ".join(f"SM{sm}" for sm in present) or "none"
        raise BuildError(
            f"a refit loads the engine on its GPU; it is for SM{description.sm}, this machine has: {found}",
            hint="run it on the GPU host; `--check` compares engine and checkpoint anywhere",
        )


def _make_constants(
    trt: Any, spec: NetworkSpec, checkpoint: Path, visit: Any, wanted: RefitList, progress: Progress
) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder

    source = CheckpointFolder.open(checkpoint)
    progress.start("weights", wanted.nbytes, "B")
    make_constants(trt, spec, source.architecture, source, visit, progress)


def make_constants(
    trt: Any, spec: NetworkSpec, architecture: Architecture, source: TensorSource, visit: Any, progress: Progress
) -> None:
    """Has the network's writer show `visit` every constant of the checkpoint, whole, one after the other."""
    from pipeline.network.network import build_stripped_network

    definition = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    build_stripped_network(trt, definition, spec, architecture, source, visit=visit, on_bytes=progress.advance)


def _serialize(trt: Any, engine: Any) -> Any:
    """The engine with the weights it was given; without the flag, it would be written without them again."""
    config = engine.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    serialized = engine.serialize_with_config(config)
    if serialized is None:
        raise BuildError("TensorRT cannot write the refitted engine", hint="its log says why")
    return serialized
