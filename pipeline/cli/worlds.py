"""Which world a config lives in, and what the others would change, for `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.tables import print_title

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.case import Case


def describe_worlds(case: Case) -> dict[str, Any]:
    from pipeline.config.worlds import list_other_worlds

    config = case.config
    return {
        "backend": config.target.backend,
        "world": config.target.world.world,
        "others": [
            {
                "backend": other.backend,
                "world": other.row.world,
                "possible": not other.reasons,
                "reasons": list(other.reasons),
                "loses": list(other.loses),
                "gains": list(other.gains),
            }
            for other in list_other_worlds(case)
        ],
    }


def print_worlds(worlds: Mapping[str, Any]) -> None:
    print_title(f"backend {worlds['backend']}: {worlds['world']}")
    for other in worlds["others"]:
        verdict = "would do" if other["possible"] else "cannot"
        click.echo(f"  {other['backend']} {verdict}: {other['world']}")
        told = (
            {"loses": other["loses"], "gains": other["gains"]} if other["possible"] else {"because": other["reasons"]}
        )
        for word, texts in told.items():
            if texts:
                click.echo(f"      {word} {'; '.join(texts)}")
