"""quantize: an engine checkpoint's linears to INT4. Left out where the method is `none`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config.recipe_rules import offered_formats
from pipeline.errors import CompatibilityError
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.sensitivity import calibration_parameters, calibration_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.schema import Config, Quantize


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    settings = config.stages.quantize
    sources: dict[str, Sequence[Path]] = {}
    if settings.measures:
        sources |= calibration_source(config)
    if settings.recipe.auto and settings.sensitivity.file is not None:
        sources["sensitivity"] = [settings.sensitivity.file]
    return sources


def _parameters(config: Config) -> Mapping[str, Any]:
    """What the method reads: rounding to nearest is not done again because a calibration setting changed."""
    parameters = config.stages.quantize.model_dump(mode="json", exclude={"calibration", "sensitivity"})
    budget = parameters.pop("budget")
    parameters["recipe"]["rows"] = [
        {key: value for key, value in row.items() if key != "reason"} for row in parameters["recipe"]["rows"]
    ]
    if config.stages.quantize.recipe.auto:
        parameters |= {"budget": budget, "formats": offered_formats(config)}
    if config.stages.quantize.measures:
        parameters["calibration"] = calibration_parameters(config)
    return parameters


def _applies(config: Config) -> bool:
    return config.stages.quantize.applies


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.quantize import quantize_checkpoint

    source, settings = CheckpointFolder.open(context.inputs["convert"].path), context.config.stages.quantize
    if settings.recipe.auto:
        settings = _solve(context, source)
    quantize_checkpoint(source, context.workspace, settings=settings, progress=context.progress)


def _solve(context: StageContext, source: CheckpointFolder) -> Quantize:
    """The settings, with the rows that recipe: auto stands for, by the file that they name or the stage before."""
    from pipeline.config.recipe import Recipe, RecipeRow
    from pipeline.quantization.automatic import solve_in
    from pipeline.quantization.sensitivity import REPORT

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
        file=settings.sensitivity.file or context.inputs["sensitivity"].path / REPORT,
        progress=context.progress,
    )
    rows = tuple(RecipeRow.model_validate({**asdict(row.override), "reason": row.reason}) for row in recipe.rows)
    return settings.model_copy(update={"recipe": Recipe(rows=rows)})


STAGE = Stage(
    name="quantize",
    version=8,
    run=_run,
    inputs=("convert", "sensitivity"),
    sources=_sources,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers"),
    applies=_applies,
)
