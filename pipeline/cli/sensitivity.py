"""trtseek sensitivity CONFIG: where quantization hurts, layer by layer and linear by linear."""

from __future__ import annotations

import json
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
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.recipe_rules import offered_formats
    from pipeline.digest import cached_digest, digest_file, digest_json
    from pipeline.errors import CompatibilityError
    from pipeline.progress import make_reporter
    from pipeline.quantization.options import list_candidates
    from pipeline.quantization.sensitivity import REPORT, measure_sensitivity
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages
    from pipeline.stages.quantize import STAGE
    from pipeline.text_file import write_text
    from pipeline.workspace import FolderWorkspace

    settings = config.stages.quantize
    if not settings.applies:
        raise CompatibilityError(
            "stages.quantize.method: none: there is nothing to measure", hint="--set stages.quantize.method=rtn"
        )
    reporter = make_reporter()
    converted = Executor(config, load_stages(), reporter).run(until="convert")["convert"]
    effort, formats = settings.sensitivity, offered_formats(config)
    texts = [file.path for file in settings.calibration.files]
    key = {
        "version": STAGE.version,
        "checkpoint": converted.content,
        "texts": [cached_digest(path) or digest_file(path) for path in texts],
        "quantize": settings.model_dump(mode="json", exclude={"recipe", "budget"}),
        "formats": formats,
    }
    place = config.output / "cache" / "sensitivity" / digest_json(key).partition(":")[2][:32]
    reporter.begin("sensitivity")
    measure_sensitivity(
        CheckpointFolder.open(converted.path),
        FolderWorkspace(place),
        settings=settings,
        candidates=list_candidates(settings.rules, formats, search=effort.search),
        effort=effort.effort,
        progress=reporter,
    )
    reporter.end("measured")
    shown = config.run_folder / REPORT
    write_text(shown, (place / REPORT).read_text(encoding="utf-8"))
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
