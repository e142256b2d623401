"""sensitivity: what quantization costs in each layer and each group of linears alone. Only where a recipe is to be
solved from it; `trtseek sensitivity` asks for it by itself. A budget is no part of it: another one is solved at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config.recipe_rules import offered_formats
from pipeline.stages.graph import Stage, StageContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config


def calibration_source(config: Config) -> Mapping[str, Sequence[Path]]:
    return {"calibration": [file.path for file in config.stages.quantize.calibration.files]}


def calibration_parameters(config: Config) -> Mapping[str, Any]:
    """Of the files the content counts (they are sources), not the path."""
    parameters = config.stages.quantize.calibration.model_dump(mode="json")
    files = [{key: value for key, value in file.items() if key != "path"} for file in parameters["files"]]
    return {**parameters, "files": files}


def _parameters(config: Config) -> Mapping[str, Any]:
    """How much text is measured, `sensitivity` says itself; a cache has no part in it."""
    parameters = config.stages.quantize.model_dump(
        mode="json",
        exclude={"recipe": True, "budget": True, "kv_cache": True, "calibration": True, "sensitivity": {"file"}},
    )
    text = {key: calibration_parameters(config)[key] for key in ("files", "seed")}
    return {**parameters, "calibration": text, "formats": offered_formats(config)}


def _applies(config: Config) -> bool:
    settings = config.stages.quantize
    return settings.applies and settings.recipe.auto and settings.sensitivity.file is None


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.options import list_candidates
    from pipeline.quantization.sensitivity import measure_sensitivity

    settings = context.config.stages.quantize
    effort, formats = settings.sensitivity, offered_formats(context.config)
    measure_sensitivity(
        CheckpointFolder.open(context.inputs["convert"].path),
        context.workspace,
        settings=settings,
        candidates=list_candidates(settings.rules, formats, search=effort.search),
        effort=effort.effort,
        progress=context.progress,
    )


STAGE = Stage(
    name="sensitivity",
    version=1,
    run=_run,
    inputs=("convert",),
    sources=calibration_source,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers"),
    applies=_applies,
)
