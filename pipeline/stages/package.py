"""package: a Triton model repository with all that it needs, and the manifest a release pipeline publishes it by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import PackageError
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import NETWORK_FILE, built_checkpoint
from pipeline.stages.verify import REPORT
from pipeline.triton import MODEL_REPO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    """The models' own code and configs: they are copied into the package."""
    return {"model_repo": sorted(path for path in MODEL_REPO.rglob("*") if path.suffix in (".py", ".pbtxt"))}


def _parameters(config: Config) -> Mapping[str, Any]:
    """Everything: the manifest carries the resolved config. Not whether the package is tried: that changes no byte."""
    return config.model_dump(mode="json", exclude={"output": True, "store": True, "stages": {"package": {"check"}}})


def _run(context: StageContext) -> None:
    flavour = context.config.target.world.flavour
    if flavour not in FLAVOURS:
        raise PackageError(
            f"no repository of flavour {flavour} is written by this version: {context.inputs['build'].path} is what to "
            "write it around",
            hint="stop before: --until build",
        )
    FLAVOURS[flavour](context)


def _package_own(context: StageContext) -> None:
    from pipeline.engine.description import load_description
    from pipeline.release.manifest import write_manifest
    from pipeline.stages.package_check import check_package
    from pipeline.triton.repository import emit_repository

    folder = context.workspace.path
    build, checkpoint = context.inputs["build"].path, built_checkpoint(context.inputs)
    emit_repository(
        folder,
        config=context.config,
        engine=build,
        checkpoint=checkpoint,
        network=build / NETWORK_FILE,
        on_link=context.workspace.recognise,
        progress=context.progress,
    )
    write_manifest(
        folder,
        config=context.config,
        engine=load_description(build),
        verification=json.loads((context.inputs["verify"].path / REPORT).read_text(encoding="utf-8")),
        checkpoint_config=json.loads((checkpoint / "config.json").read_text(encoding="utf-8")),
        progress=context.progress,
    )
    check_package(context, folder, checkpoint)


FLAVOURS: Mapping[str, Callable[[StageContext], None]] = {"trtseek": _package_own}
STAGE = Stage(
    name="package",
    version=2,
    run=_run,
    inputs=("convert", "quantize", "verify", "build"),
    sources=_sources,
    parameters=_parameters,
    libraries=("trtseek", "tritonclient", "protobuf"),
)
