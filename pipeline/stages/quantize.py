"""quantize: an engine checkpoint's linears to INT4. Left out where the method is `none`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.stages.graph import Stage, StageContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    settings = config.stages.quantize
    return {"calibration": [file.path for file in settings.calibration.files]} if settings.measures else {}


def _parameters(config: Config) -> Mapping[str, Any]:
    """What the method reads: rounding to nearest is not done again because a calibration setting changed. Of the
    calibration files the content counts (they are sources), not the path."""
    parameters = config.stages.quantize.model_dump(mode="json")
    calibration = parameters.pop("calibration")
    if config.stages.quantize.measures:
        files = [{key: value for key, value in file.items() if key != "path"} for file in calibration["files"]]
        parameters["calibration"] = {**calibration, "files": files}
    return parameters


def _applies(config: Config) -> bool:
    return config.stages.quantize.applies


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.quantize import quantize_checkpoint

    quantize_checkpoint(
        CheckpointFolder.open(context.inputs["convert"].path),
        context.workspace,
        settings=context.config.stages.quantize,
        progress=context.progress,
    )


STAGE = Stage(
    name="quantize",
    version=2,
    run=_run,
    inputs=("convert",),
    sources=_sources,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers"),
    applies=_applies,
)
