"""trtseek gc: free the space of what no run and no repository uses any more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import json_option, print_json, read_config
from pipeline.cli.tables import print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.stages.collection import Holding

SHORT = 12  # digits of a fingerprint that are shown


@click.command(name="gc")
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.option("--output", type=click.Path(path_type=Path), help="The output folder, in place of a config's.")
@click.option("--store", type=click.Path(path_type=Path), help="The store itself, where outputs share one.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def command(config_file: str | None, output: Path | None, store: Path | None, yes: bool, as_json: bool) -> None:
    """Remove from the store what nothing uses.

    Kept is what an output folder shows, what that was made from, what a killed run can go on with, what a run at work
    holds, and what is linked from outside, as by a copied repository. Prints what would go and asks; where nobody can
    answer, and with --json, nothing is removed without --yes. Safe beside runs at work.
    """
    from pipeline.errors import StoreError
    from pipeline.stages.collection import remove, survey
    from pipeline.stages.store import Store

    place = Store(_pick_store(config_file, output, store))
    if (named := output or store) and not place.root.is_dir():
        raise StoreError(
            f"{place.root}: there is no such store",
            hint=_explain_absence(named, place.root),
        )
    holdings = survey(place)
    garbage = [holding for holding in holdings if not holding.used]
    if not as_json:
        _print_holdings(place.root, holdings, garbage)
    if not garbage:
        removed: list[Holding] = []
    elif yes or (not as_json and sys.stdin.isatty() and click.confirm("remove it?")):
        removed = remove(place, garbage)
    else:
        removed = []
        if not as_json:
            click.echo("nothing was removed: --yes does it")
    if as_json:
        document = {
            "store": str(place.root),
            "kept": [_to_json(holding) for holding in holdings if holding.used],
            "garbage": [_to_json(holding) for holding in garbage],
            "garbage_bytes": sum(holding.nbytes for holding in garbage),
            "removed": [str(holding.path) for holding in removed],
        }
        print_json(document)
    elif removed:
        from pipeline.progress import format_amount

        click.echo(f"{format_amount(sum(holding.nbytes for holding in removed), 'B')} freed")
        for holding in garbage:
            if holding not in removed:
                click.echo(f"  {holding.path} stays: a run has taken it up meanwhile")


def _pick_store(config_file: str | None, output: Path | None, store: Path | None) -> Path:
    if sum(value is not None for value in (config_file, output, store)) != 1:
        raise click.UsageError("name one of CONFIG, --output and --store")
    if config_file is not None:
        return read_config(config_file, ()).store_folder
    return store or (output or Path()) / "store"


def _explain_absence(named: Path, root: Path) -> str:
    if named.is_file():
        return f"{named} is a file: a config is named without --output, --output takes the folder of its `output:`"
    if named != root and named.is_dir():
        return f"{named} is there, but nothing was made in it"
    return "name the folder that a config's `output:` names, or its `store:` with --store"


def _print_holdings(root: Path, holdings: Sequence[Holding], garbage: Sequence[Holding]) -> None:
    from pipeline.progress import format_amount

    print_title(str(root))
    rows = []
    for holding in holdings:
        name = holding.stage or "left over"
        size = format_amount(holding.nbytes, "B")
        part = " (unfinished)" if holding.kind == "partial" else ""
        verdict = "kept" if holding.used else "unused"
        rows.append((name + part, holding.fingerprint[:SHORT], size, verdict, holding.used))
    if rows:
        print_table(rows)
    total = format_amount(sum(holding.nbytes for holding in garbage), "B")
    if garbage:
        click.echo(f"{len(garbage)} unused, {total} to free")
    else:
        click.echo("everything is in use" if holdings else "nothing was made yet")


def _to_json(holding: Holding) -> dict[str, Any]:
    return {
        "path": str(holding.path),
        "kind": holding.kind,
        "stage": holding.stage,
        "fingerprint": holding.fingerprint,
        "bytes": holding.nbytes,
        "used": holding.used or None,
    }
