"""Arguments and options that several verbs share."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.config.schema import Config

    Command = Callable[..., None]


class OutputFile(click.Path):
    """Where a file is to be written: what cannot be one is refused before there are minutes of work to lose."""

    def __init__(self) -> None:
        super().__init__()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        place = path.absolute().parent
        if path.is_dir():
            self.fail(f"{path} is a folder, where a file is to be written", param, ctx)
        if not place.is_dir():
            what = "is no folder" if place.exists() else "does not exist: make that folder first, or name another"
            self.fail(f"{path} cannot be written: {place} {what}", param, ctx)
        if not os.access(place, os.W_OK | os.X_OK):
            self.fail(f"{path} cannot be written: {place} gives no permission", param, ctx)
        return path


class Seconds(click.FloatRange):
    """A time to wait: what is no number, or longer than anybody lives, is refused, as the system would."""

    def __init__(self) -> None:
        super().__init__(0, 1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):  # which is in every range
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


def config_argument(command: Command) -> Command:
    """CONFIG and --set, passed on as `config_file` and `overrides`."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a setting, e.g. stages.quantize.group_size=64. May be repeated.",
    )(command)
    return click.argument("config_file", metavar="CONFIG")(command)


def range_options(command: Command) -> Command:
    """--from, --until and --force, passed on as `start`, `until` and `force`."""
    for option in (
        click.option("--force", multiple=True, metavar="STAGE", help="Make STAGE again from nothing. May be repeated."),
        click.option("--until", metavar="STAGE", help="Stop after STAGE."),
        click.option("--from", "start", metavar="STAGE", help="Start at STAGE; the ones before must be made already."),
    ):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def read_config(config_file: str, overrides: Sequence[str]) -> Config:
    """ConfigError where it cannot be read."""
    from pipeline.config.load import load_config

    return load_config(config_file, overrides)


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
