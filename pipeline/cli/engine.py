"""trtseek engine CONFIG: run what is not made yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.cli.options import config_argument, range_options, read_config
from pipeline.errors import GateError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.schema import Config


@click.command(name="engine")
@config_argument
@range_options
def command(
    config_file: str, overrides: tuple[str, ...], start: str | None, until: str | None, force: tuple[str, ...]
) -> None:
    """Make the engine: run every stage that is not made yet.

    CONFIG is a YAML file, as a path or as a name in configs/. The stages are convert, quantize, verify, build and
    package. What a stage made is kept in a store, <output>/store, and used again as long as its settings and inputs
    stay the same; a run that was stopped goes on where it was. <output>/<name> shows the results.
    """
    from pipeline.cli.source import check_source
    from pipeline.progress import make_reporter
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages

    config = read_config(config_file, overrides)
    reporter = make_reporter()
    source = check_source(config)
    for note in source.host_notes:  # before hours of work that ends here
        reporter.note(note)
    executor = Executor(config, load_stages(), reporter)
    try:
        made = executor.run(start=start, until=until, force=force)
    except GateError:
        _report(config)
        raise
    page = _report(config) if "verify" in made else None  # once there is a proof to show
    folder = config.run_folder
    width = max(map(len, made), default=0)
    for stage in made:
        click.echo(f"{stage.ljust(width)}  {folder / stage}")
    if page is not None:
        click.echo(f"{'report'.ljust(width)}  {page}")
    outcomes = executor.folder.read()
    if any(outcomes.get(stage, {}).get("state") == "made" for stage in made):  # told once: `plan` says it again
        for note in source.notes:
            click.echo(f"note: {note}", err=True)


def _report(config: Config) -> Path | None:
    """The run's page; None where a folder for reading only takes none: what was asked for is made all the same."""
    from pipeline.stages.run_report import write_report

    try:
        return write_report(config)
    except StoreError as error:
        click.echo(f"note: no report is written: {error.message}", err=True)
        return None
