"""trtseek sensitivity CONFIG: where quantization hurts, layer by layer and linear by linear."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import config_argument, json_option, print_json, read_config
from pipeline.cli.tables import print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.config.schema import Config


@click.command(name="sensitivity")
@config_argument
@json_option
def command(config_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure each layer, and each group of linears, quantized alone.

    Runs `convert` if it was not. Columns: the KL divergence of the logits (nats per token, estimated from gradients)
    and the relative error of what the layer adds. Kept in <output>/<name>/sensitivity.json, which `recipe` reads; a
    measurement that was stopped goes on where it was. Effort and formats: stages.quantize.sensitivity.
    """
    from pipeline.cli.source import check_source

    config = read_config(config_file, overrides)
    check_source(config)
    path = measure(config)
    found = json.loads(path.read_text(encoding="utf-8"))
    if as_json:
        print_json(found)
        return
    print_sensitivity(found)
    click.echo(f"{path}")


def measure(config: Config) -> Path:
    """sensitivity.json of the config's checkpoint, made where there is none of these settings."""
    from pipeline.errors import CompatibilityError
    from pipeline.progress import make_reporter
    from pipeline.quantization.sensitivity import REPORT
    from pipeline.stages.disk import explain_disk_errors
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages
    from pipeline.stages.sensitivity import STAGE
    from pipeline.text_file import write_text

    if not config.stages.quantize.applies:
        raise CompatibilityError(
            "stages.quantize.method: none: there is nothing to measure", hint="--set stages.quantize.method=rtn"
        )
    # Whether or not a recipe is to be solved from it.
    stages = [replace(stage, applies=lambda _: True) if stage.name == STAGE.name else stage for stage in load_stages()]
    made = Executor(config, stages, make_reporter()).run(until=STAGE.name)[STAGE.name]
    shown = config.run_folder / REPORT
    with explain_disk_errors(shown.parent):
        write_text(shown, (made.path / REPORT).read_text(encoding="utf-8"))
    return shown


def print_sensitivity(found: Mapping[str, Any]) -> None:
    """A row per layer: the whole of it, then each of its units."""
    name = found["method"]
    print_title(f"KL (nats per token) and layer error of each alone as {name}, the others as they were")
    places = list(dict.fromkeys(unit["unit"] for unit in found["units"]))
    units = {(unit["layer"], unit["unit"]): unit["candidates"].get(name) for unit in found["units"]}
    rows = [["layer", "whole", *places]]
    for layer in found["layers"]:
        cells = [units.get((layer["layer"], place)) for place in places]
        rows.append([str(layer["layer"]), *(_spell(cell) for cell in (layer, *cells))])
    print_table(rows)


def _spell(figures: Mapping[str, float] | None) -> str:
    return f"{figures['kl']:.1e} {figures['error']:.3f}" if figures else "-"
