"""trtseek plan CONFIG: what a run would do and why, and whether the result fits the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import config_argument, json_option, print_json, range_options, read_config
from pipeline.cli.tables import print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.stages.plan import StagePlan

WORDS = {"run": "will run", "cached": "cached", "undetermined": "undetermined", "skipped": "skipped"}


@click.command(name="plan")
@config_argument
@range_options
@json_option
def command(
    config_file: str,
    overrides: tuple[str, ...],
    start: str | None,
    until: str | None,
    force: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what `engine` would run and why, and what fits the GPU.

    Makes nothing. The memory is computed from the checkpoint's headers and the limits in the config: weights, workspace
    and KV cache against the GPU's memory, and the largest batch for each context length; of several GPUs, what each
    holds, and what they send each other for a token. What a run takes of this host's disk, memory and time is
    estimated, and what serving takes of its memory. Of the other backends it says whether they could take this config,
    and what would change.
    """
    from pipeline.cli.exchanges import describe_exchanges, print_exchanges
    from pipeline.cli.foreign_memory import describe_foreign_memory, print_foreign_memory
    from pipeline.cli.host import describe_host, print_host
    from pipeline.cli.memory import describe_memory, print_memory
    from pipeline.cli.source import check_source
    from pipeline.cli.worlds import describe_worlds, print_worlds
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages

    config = read_config(config_file, overrides)
    source = check_source(config)
    plans = Executor(config, load_stages()).plan(start=start, until=until, force=force)
    foreign = config.target.world.foreign
    describe = describe_foreign_memory if foreign else describe_memory
    case = source.case
    memory, host, worlds = describe(case), describe_host(case), describe_worlds(case)
    exchanges = describe_exchanges(case)
    if as_json:
        stages = [_to_json(plan) for plan in plans]
        notes = list(source.notes)
        parts = {"stages": stages, "memory": memory, "exchanges": exchanges, "host": host, "worlds": worlds}
        print_json({"name": config.name, **parts, "notes": notes})
        return
    print_title(f"{config.name}: {config.model.path} for {config.target.gpu} by {config.target.backend}")
    print_plans(plans)
    (print_foreign_memory if foreign else print_memory)(memory)
    print_exchanges(exchanges)
    print_host(host)
    print_worlds(worlds)
    for note in source.notes:
        click.echo(f"  note: {note}")


def print_plans(plans: Sequence[StagePlan]) -> None:
    rows = []
    for plan in plans:
        first, *rest = plan.reasons or [""]
        rows.append((plan.stage, WORDS[plan.state], first))
        rows += [("", "", reason) for reason in rest]
    print_table(rows)


def _to_json(plan: StagePlan) -> dict[str, Any]:
    return {
        "stage": plan.stage,
        "state": plan.state,
        "reasons": plan.reasons,
        "fingerprint": plan.fingerprint,
        "path": str(plan.artifact.path) if plan.artifact else None,
    }
