"""trtseek status CONFIG: which stages are made, when, how large, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import config_argument, json_option, print_json, read_config
from pipeline.cli.tables import print_table, print_title
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.stages.executor import Executor
    from pipeline.stages.plan import StagePlan


@click.command(name="status")
@config_argument
@json_option
@click.option("--digests", is_flag=True, help="Read every file and check its digest; leaves with 7 if one differs.")
def command(config_file: str, overrides: tuple[str, ...], as_json: bool, digests: bool) -> None:
    """Say which stages of a config are made, and how the last run ended."""
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages

    config = read_config(config_file, overrides)
    executor = Executor(config, load_stages())
    last = executor.folder.read()
    plans = executor.plan()
    stages = [_describe(plan, last) for plan in plans]
    checked, damage = _check_digests(executor, plans, last) if digests else ([], [])
    if as_json:
        print_json({"name": config.name, "folder": str(executor.folder.path), "stages": stages, "damage": damage})
    else:
        print_title(f"{config.name}: {executor.folder.path}")
        print_table([_row(stage) for stage in stages])
        if digests and not damage:
            of = f"every file of {', '.join(checked)} has the digest it was written with"
            click.echo(f"  {of if checked else 'nothing is made, so no file was read'}")
    if damage:
        raise StoreError(
            "\n".join(damage), hint="run `trtseek engine` with --force and the stage's name to make it again"
        )


def _describe(plan: StagePlan, last: Mapping[str, Any]) -> dict[str, Any]:
    """State: cached; stale (made before, for other settings); missing; skipped; or how the last run left it: failed,
    stopped, begun (killed, or still at work), waiting (for what is built elsewhere)."""
    entry = last.get(plan.stage, {})
    state: str = plan.state
    if plan.state == "run":
        same = entry.get("fingerprint") == plan.fingerprint
        unfinished = entry.get("state") in ("failed", "stopped", "begun", "waiting")
        state = entry["state"] if same and unfinished else "stale" if entry and not unfinished else "missing"
    artifact = plan.artifact
    return {
        "stage": plan.stage,
        "state": state,
        "reasons": plan.reasons,
        "fingerprint": plan.fingerprint,
        "created": artifact.created if artifact else None,
        "seconds": artifact.seconds if artifact else None,
        "bytes": artifact.nbytes if artifact else None,
        "path": str(artifact.path) if artifact else None,
    }


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    from pipeline.progress import format_amount, format_seconds

    if stage["path"] is None:
        return stage["stage"], stage["state"], "", "", "; ".join(stage["reasons"])
    size, took = format_amount(stage["bytes"], "B"), format_seconds(stage["seconds"])
    return stage["stage"], stage["state"], size, f"in {took}", f"{stage['created']}  {stage['path']}"


def _check_digests(
    executor: Executor, plans: Sequence[StagePlan], last: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Reads every file that the store has for these stages: under the fingerprints of now, and of the last run, whose
    results are stale but shown. The stages that were read, and what is damaged."""
    checked, damage = [], []
    for plan in plans:
        prints = (plan.fingerprint, last.get(plan.stage, {}).get("fingerprint"))
        for fingerprint in dict.fromkeys(filter(None, prints)):
            if not executor.store.has(plan.stage, fingerprint):
                continue
            checked.append(plan.stage)
            finding = executor.store.find(plan.stage, fingerprint, full=True)
            if finding.artifact is None:
                damage.append(f"{plan.stage}: {finding.reason.removeprefix('damaged: ')}")
    return list(dict.fromkeys(checked)), damage
