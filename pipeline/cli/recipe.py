"""trtseek recipe CONFIG: the best format for each group of linears within a budget, as a file to edit and use again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import OutputFile, config_argument, json_option, print_json, read_config
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.quantization.options import Goal


@click.command(name="recipe")
@config_argument
@click.option("--budget", metavar="KIND=LIMIT", help="size_ratio, bits_per_weight or kl; else stages.quantize.budget.")
@click.option("--output", "-o", type=OutputFile(), help="The file; else <output>/<name>/recipe.yaml.")
@click.option("--force", is_flag=True, help="Write over a file that holds something else.")
@json_option
def command(
    config_file: str, overrides: tuple[str, ...], budget: str | None, output: Path | None, force: bool, as_json: bool
) -> None:
    """Solve for a recipe from measured sensitivity, and write it as YAML.

    Measures what `sensitivity` did not yet. The file goes where stages.quantize.recipe names one; each row says why.
    One that is there and was edited, or holds anything else, stays as it is without --force.
    """
    from pipeline.cli.sensitivity import measure
    from pipeline.cli.source import check_source
    from pipeline.config.recipe_rules import BUDGET_HINT, explain_impossible, offered_formats
    from pipeline.quantization.catalog import NONE
    from pipeline.quantization.recipe import RECIPE, solve
    from pipeline.quantization.sensitivity_file import read_sensitivity
    from pipeline.stages.disk import explain_disk_errors
    from pipeline.text_file import write_text

    config = read_config(config_file, overrides)
    goal = _find_goal(config, budget)
    case, path, settings = check_source(config).case, output or config.run_folder / RECIPE, config.stages.quantize
    if problem := explain_impossible(case, goal):
        raise ConfigError(problem, hint=BUDGET_HINT)
    _keep_edited(path, force=force)  # before hours of measuring, and once more after them
    found = read_sensitivity(settings.sensitivity.file or measure(config), case.architecture, settings.rules)
    recipe = solve(found, settings.method, goal, formats=offered_formats(config))
    _keep_edited(path, force=force)
    with explain_disk_errors(path.parent):
        write_text(path, recipe.render())
    if set(recipe.counts) == {NONE}:
        click.echo("note: this recipe quantizes nothing, and a run refuses it: take another budget", err=True)
    summary = {
        "file": str(path),
        "kl": recipe.kl,
        "size_ratio": recipe.size_ratio,
        "bits_per_weight": recipe.bits_per_weight,
        "units": dict(recipe.counts),
    }
    if as_json:
        print_json(summary)
        return
    for line in recipe.render().splitlines()[:2]:
        click.echo(line.removeprefix("# "))
    click.echo(f"{path}")


def _keep_edited(path: Path, *, force: bool) -> None:
    from pipeline.quantization.recipe import is_edited
    from pipeline.stages.disk import explain_disk_errors

    with explain_disk_errors(path.parent):
        solved = path.is_file() and not is_edited(path.read_text(encoding="utf-8", errors="replace"))
        if os.path.lexists(path) and not (solved or force):
            raise ConfigError(
                f"{path} is there, and is no recipe as this version solved one: it was edited, or is older",
                hint="--force writes over it, -o FILE beside it",
            )


def _find_goal(config: Config, budget: str | None) -> Goal:
    from pydantic import ValidationError

    from pipeline.config.recipe import Budget

    if budget is None:
        if config.stages.quantize.budget is None:
            raise ConfigError("there is no budget", hint="--budget size_ratio=0.4, or set stages.quantize.budget")
        return config.stages.quantize.budget.goal
    kind, _, limit = budget.partition("=")
    try:
        return Budget.model_validate({kind: float(limit)}).goal
    except (ValidationError, ValueError) as error:
        raise ConfigError(
            f"--budget {budget}: must be KIND=LIMIT, KIND one of {', '.join(Budget.model_fields)}, LIMIT above 0",
            hint="e.g. --budget bits_per_weight=4.5",
        ) from error
