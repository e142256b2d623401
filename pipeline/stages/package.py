"""package: a Triton model repository with all that it needs, and the manifest a release pipeline publishes it by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.stages.foreign_package import package_llmapi, package_tensorrt_llm
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import NETWORK_FILE, built_checkpoint
from pipeline.stages.package_check import check_package
from pipeline.stages.verify import RECORD
from pipeline.triton import MODEL_REPO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.release.manifest import Built

COPIED = (".py", ".pbtxt", ".sh")


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    """The models' own code and configs: they are copied into the package."""
    return {"model_repo": sorted(path for path in MODEL_REPO.rglob("*") if path.suffix in COPIED)}


def _parameters(config: Config) -> Mapping[str, Any]:
    """Everything: the manifest carries the resolved config. Not whether the package is tried: that changes no byte."""
    return config.model_dump(mode="json", exclude={"output": True, "store": True, "stages": {"package": {"check"}}})


def _run(context: StageContext) -> None:
    from pipeline.release.manifest import write_manifest

    folder, checkpoint = context.workspace.path, built_checkpoint(context.inputs)
    built = FLAVOURS[context.config.target.world.flavour](context)
    write_manifest(
        folder,
        config=context.config,
        built=built,
        verification=json.loads((context.inputs["verify"].path / RECORD).read_text(encoding="utf-8")),
        checkpoint_config=json.loads((checkpoint / "config.json").read_text(encoding="utf-8")),
        progress=context.progress,
    )
    check_package(context, folder, checkpoint)


def _package_own(context: StageContext) -> Built:
    from pipeline.engine.description import load_description
    from pipeline.release.manifest import Built
    from pipeline.triton.repository import emit_repository

    build = context.inputs["build"].path
    emit_repository(
        context.workspace.path,
        config=context.config,
        engine=build,
        checkpoint=built_checkpoint(context.inputs),
        network=build / NETWORK_FILE,
        on_link=context.workspace.recognise,
        progress=context.progress,
    )
    engine = load_description(build)
    return Built(
        backend=engine.backend,
        backend_version=engine.backend_version,
        sm=engine.sm,
        digest=engine.set_digest,
        networks=[rank.network_digest for rank in engine.all_ranks],
    )


FLAVOURS: Mapping[str, Callable[[StageContext], Built]] = {
    "trtseek": _package_own,
    "tensorrtllm": package_tensorrt_llm,
    "llmapi": package_llmapi,
}
STAGE = Stage(
    name="package",
    version=3,
    run=_run,
    inputs=("convert", "quantize", "prove", "verify", "build"),
    sources=_sources,
    parameters=_parameters,
    libraries=("trtseek", "tritonclient", "protobuf"),
)
