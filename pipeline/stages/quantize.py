"""quantize: an engine checkpoint's linears to INT4. Left out where the method is `none`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config.recipe_rules import offered_formats
from pipeline.errors import CompatibilityError
from pipeline.stages.graph import Stage, StageContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.schema import Config, Quantize


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    settings = config.stages.quantize
    sources: dict[str, Sequence[Path]] = {}
    if settings.measures:
        sources["calibration"] = [file.path for file in settings.calibration.files]
    if settings.recipe.auto and settings.sensitivity.file is not None:
        sources["sensitivity"] = [settings.sensitivity.file]
    return sources


def _parameters(config: Config) -> Mapping[str, Any]:
    """What the method reads: rounding to nearest is not done again because a calibration setting changed. Of the
    calibration files the content counts (they are sources), not the path."""
    parameters = config.stages.quantize.model_dump(mode="json")
    calibration, sensitivity, budget = (parameters.pop(key) for key in ("calibration", "sensitivity", "budget"))
    parameters["recipe"]["rows"] = [
        {key: value for key, value in row.items() if key != "reason"} for row in parameters["recipe"]["rows"]
    ]
    if config.stages.quantize.recipe.auto:
        del sensitivity["file"]  # its content counts, as a source
        parameters |= {"budget": budget, "sensitivity": {**sensitivity, "formats": offered_formats(config)}}
    if config.stages.quantize.measures:
        files = [{key: value for key, value in file.items() if key != "path"} for file in calibration["files"]]
        parameters["calibration"] = {**calibration, "files": files}
    return parameters


def _applies(config: Config) -> bool:
    return config.stages.quantize.applies


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.automatic import clean
    from pipeline.quantization.quantize import quantize_checkpoint

    source, settings = CheckpointFolder.open(context.inputs["convert"].path), context.config.stages.quantize
    if settings.recipe.auto:
        settings = _solve(context, source)
    quantize_checkpoint(source, context.workspace, settings=settings, progress=context.progress)
    if context.config.stages.quantize.recipe.auto:
        clean(context.workspace)


def _solve(context: StageContext, source: CheckpointFolder) -> Quantize:
    """The settings, with the rows that recipe: auto stands for."""
    from pipeline.config.recipe import Recipe, RecipeRow
    from pipeline.quantization.automatic import solve_in

    settings = context.config.stages.quantize
    if settings.budget is None:
        raise CompatibilityError(
            "stages.quantize.recipe: auto has nothing to solve for", hint="set stages.quantize.budget"
        )
    recipe = solve_in(
        source,
        context.workspace,
        settings=settings,
        goal=settings.budget.goal,
        formats=offered_formats(context.config),
        effort=settings.sensitivity.effort,
        search=settings.sensitivity.search,
        file=settings.sensitivity.file,
        progress=context.progress,
    )
    rows = tuple(RecipeRow.model_validate({**asdict(row.override), "reason": row.reason}) for row in recipe.rows)
    return settings.model_copy(update={"recipe": Recipe(rows=rows)})


STAGE = Stage(
    name="quantize",
    version=7,
    run=_run,
    inputs=("convert",),
    sources=_sources,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers"),
    applies=_applies,
)
