"""trtseek explain CONFIG STAGE: what decides a stage's output, and what of it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import config_argument, json_option, print_json, read_config
from pipeline.cli.tables import print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import Config
    from pipeline.stages.explanation import Explanation

    Records = Mapping[str, dict[str, Any]]

SHORT = len("blake3:") + 16


@click.command(name="explain")
@config_argument
@click.argument("stage")
@click.option("--against", metavar="CONFIG", help="Compare with another config, not with the last run of this one.")
@json_option
def command(config_file: str, stage: str, overrides: tuple[str, ...], against: str | None, as_json: bool) -> None:
    """Say what STAGE's fingerprint is made of, and what changed.

    The fingerprint decides whether a result is used again. It covers the stage's version and settings, the files it
    reads, the stages before it, the libraries that decide its bytes, and the target. Changes are told for the stage and
    for all before it, against the last run of the config, or against another config with --against.
    """
    from pipeline.errors import CompatibilityError
    from pipeline.stages.explanation import compare, explain_stages
    from pipeline.stages.graph import load_stages, pick_stage

    config, stages = read_config(config_file, overrides), load_stages()
    pick_stage(stage, stages)
    _use_digests(config)
    found = explain_stages(config, stages, stage)
    if stage not in found:
        raise CompatibilityError(f"{config.name} has no use for {stage}", hint="`trtseek plan` says which stages run")
    other, old = _read_old(config, against, stage)
    changes = compare(stage, old, {name: entry.record for name, entry in found.items()}) if stage in old else None
    if as_json:
        print_json(
            {
                "stage": stage,
                "fingerprint": found[stage].fingerprint,
                "record": found[stage].record,
                "unread_bytes": found[stage].unread,
                "against": other,
                "changes": None if changes is None else [{"stage": name, "change": line} for name, line in changes],
            }
        )
        return
    print_explanation(found[stage])
    if changes is None:
        click.echo(f"nothing to compare with: {other} has no {stage}")
    elif changes:
        print_title(f"changed against {other}")
        print_table(changes)
    else:
        click.echo(f"the same as in {other}")


def _use_digests(config: Config) -> None:
    from pipeline.digest import set_digest_cache
    from pipeline.stages.store import Store

    set_digest_cache(Store(config.store_folder).digests)


def _read_old(config: Config, against: str | None, stage: str) -> tuple[str, Records]:
    from pipeline.stages.explanation import explain_stages
    from pipeline.stages.graph import load_stages
    from pipeline.stages.run_folder import RunFolder

    if against is None:
        last = RunFolder(config.run_folder).read()
        return f"the last run in {config.run_folder}", {name: entry["record"] for name, entry in last.items()}
    other = read_config(against, ())
    return against, {name: entry.record for name, entry in explain_stages(other, load_stages(), stage).items()}


def print_explanation(explanation: Explanation) -> None:
    from pipeline.progress import format_amount

    record = explanation.record
    print_title(f"{explanation.stage}: {explanation.fingerprint or 'not known yet'}")
    if explanation.unread:
        click.echo(f"  {format_amount(explanation.unread, 'B')} of its sources were never read; a run reads them first")
    rows = [("version", "", str(record["version"]))]
    rows += [("setting", name, value) for name, value in _flatten(record["parameters"])]
    rows += [("target", name, value) for name, value in _flatten(record["target"] or {})]
    rows += [("stage", name, digest[:SHORT]) for name, digest in record["inputs"].items()]
    for source, files in record["sources"].items():
        rows += [(source, name, digest[:SHORT] if digest else "not read yet") for name, digest in files]
    rows += [("library", name, version or "absent") for name, version in record["libraries"].items()]
    print_table(
        [(kind if index == 0 or rows[index - 1][0] != kind else "", *rest) for index, (kind, *rest) in enumerate(rows)]
    )


def _flatten(values: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(values, dict):
        return [row for key, value in values.items() for row in _flatten(value, f"{path}.{key}" if path else str(key))]
    import json

    return [(path, values if isinstance(values, str) else json.dumps(values, ensure_ascii=False))]
