"""trtseek report CONFIG: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import OutputFile, config_argument, read_config
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from pipeline.config.schema import Config


@click.command(name="report")
@config_argument
@click.option("--output", type=OutputFile(), metavar="FILE", help="Default: <output>/<name>/report.html.")
def command(config_file: str, overrides: tuple[str, ...], output: Path | None) -> None:
    """Write a run's report: one HTML page that needs nothing but itself.

    It shows what is made so far: stages with times and sizes, every gate with its value, quality by layer, position and
    context, the activation-error heat map, tokens per expert, and the worst prompts side by side.
    """
    from pipeline.stages.run_report import write_report

    config = read_config(config_file, overrides)
    path = write_report(config, output)
    if path is None:
        raise StoreError(f"{config.run_folder} shows no stage", hint="make some first: trtseek engine CONFIG")
    click.echo(path)


def report_run(config: Config) -> Path | None:
    """For verbs that make stages: the run's page. None where a folder for reading only takes none, which is noted: what
    was asked for is made all the same."""
    from pipeline.stages.run_report import write_report

    try:
        return write_report(config)
    except StoreError as error:
        click.echo(f"note: no report is written: {error.message}", err=True)
        return None
