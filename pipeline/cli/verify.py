"""trtseek verify CONFIG: the proofs of a config's checkpoints, made if they are not yet, and what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import config_argument, json_option, print_json, read_config
from pipeline.cli.report import report_run
from pipeline.errors import GateError

if TYPE_CHECKING:
    from pipeline.config.schema import Config


@click.command(name="verify")
@config_argument
@click.option("--force", is_flag=True, help="Prove again, whatever the store has.")
@json_option
def command(config_file: str, overrides: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Prove a config's checkpoints and measure what quantization cost.

    Runs the stages up to verify that are not made yet, and shows every gate with its value and bound. Leaves with 5
    where one fails; its report is shown all the same, and kept in <output>/<name>/verify.failed. What is made so far is
    in <output>/<name>/report.html.
    """
    from pipeline.cli.source import check_source
    from pipeline.progress import make_reporter
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages

    config = read_config(config_file, overrides)
    check_source(config)
    executor = Executor(config, load_stages(), make_reporter())
    try:
        executor.run(until="verify", force=("prove", "verify") if force else ())
    except GateError:
        _show(config, "verify.failed", as_json)
        raise
    _show(config, "verify", as_json)


def _show(config: Config, outcome: str, as_json: bool) -> None:
    """`outcome`: the folder's name in the run's."""
    from pipeline.stages.verify import RECORD, SUMMARY

    folder, page = config.run_folder / outcome, report_run(config)
    if as_json:
        print_json(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    else:
        click.echo((folder / SUMMARY).read_text(encoding="utf-8"), nl=False)
    if page is not None:
        click.echo(f"report: {page}", err=True)
