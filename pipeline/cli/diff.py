"""trtseek diff A B: what differs between two runs, stage outputs, checkpoints or engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import json_option, print_json
from pipeline.cli.tables import print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANY = 20  # rows of one kind that are shown; --json has them all


@click.command(name="diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--exit-code", is_flag=True, help="Leave with 1 if anything differs, as git diff does.")
@json_option
@click.pass_context
def command(context: click.Context, a: Path, b: Path, exit_code: bool, as_json: bool) -> None:
    """Say what differs from A to B.

    Each is a run's folder (out/NAME), the output of a stage, a checkpoint's folder, or an engine. Compared are
    settings, tensors (added, removed, of another type or shape, and how many values are how far apart), gates, kernels
    and versions. Tensors are read as a stream.
    """
    from pipeline.cli.comparison import compare_paths
    from pipeline.progress import SILENT, make_reporter

    document = compare_paths(a, b, SILENT if as_json else make_reporter())
    if as_json:
        print_json(document)
    else:
        _print(document)
    if exit_code and not document["same"]:
        context.exit(1)


def _print(document: Mapping[str, Any]) -> None:
    print_title(f"{document['a']} → {document['b']}")
    if document["same"]:
        click.echo("  nothing differs")
        return
    for side, key in ((document["a"], "only_in_a"), (document["b"], "only_in_b")):
        if document[key]:
            click.echo(f"  only in {side}: {', '.join(document[key])}")
    _print_rows("settings", [(row["stage"], row["change"]) for row in document["settings"]])
    for name, part in document["parts"].items():
        if part["same"]:
            print_title(f"{name}: the same")
            continue
        print_title(f"{name}: differs")
        _print_rows("config.json", [(line,) for line in part.get("config", ())])
        if part.get("tensors"):
            _print_tensors(part["tensors"])
        for section in ("figures", "gates", "profiles", "kernels", "fusions", "inputs", "outputs", "files", "versions"):
            rows = [_spell_row(row) for row in part.get(section, ())]
            _print_rows(section, rows)


def _print_tensors(tensors: Mapping[str, Any]) -> None:
    _print_rows("added tensors", [(name,) for name in tensors["added"]])
    _print_rows("removed tensors", [(name,) for name in tensors["removed"]])
    for kind in ("reshaped", "retyped", "changed"):
        rows = sorted(tensors[kind], key=lambda row: -(row["largest"] or 0.0))
        _print_rows(f"{kind} tensors", [_spell_tensor(row) for row in rows])
    click.echo(f"  {tensors['same']} tensors are the same")


def _spell_tensor(row: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = row["before"], row["after"]
    types = before if before == after else f"{before} → {after}"
    if row["changed"] is None:
        return row["name"], types, "", ""
    largest = "NaN on one side" if row["largest"] is None else f"by up to {row['largest']:.6g}"
    return row["name"], types, f"{row['changed']:,} of {row['elements']:,} values", largest if row["changed"] else ""


def _spell_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "a" not in row:
        return tuple(str(value) for value in row.values())
    *names, before, after = row.values()
    return (*map(str, names), f"{_spell(before)} → {_spell(after)}")


def _spell(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_rows(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    if not rows:
        return
    click.echo(f"  {title} ({len(rows)})" if len(rows) > MANY else f"  {title}")
    print_table(rows[:MANY], indent=4)
    if len(rows) > MANY:
        click.echo(f"    and {len(rows) - MANY} more")
