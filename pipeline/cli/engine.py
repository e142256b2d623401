"""trtseek engine CONFIG: run what is not made yet."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import config_argument, range_options, read_config
from pipeline.cli.report import report_run
from pipeline.cli.tables import format_bytes
from pipeline.errors import GateError, PendingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.config.schema import Config
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import Stage


@click.command(name="engine")
@config_argument
@range_options
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="ENGINE_DIR",
    help="Take the engine of TensorRT-LLM that the job built elsewhere, and go on with it.",
)
@click.pass_context
def command(
    ctx: click.Context,
    config_file: str,
    overrides: tuple[str, ...],
    start: str | None,
    until: str | None,
    force: tuple[str, ...],
    resume: Path | None,
) -> None:
    """Make the engine: run every stage that is not made yet.

    CONFIG is a YAML file, as a path or as a name in configs/. The stages are convert, quantize, prove, verify, build
    and package; before build comes job where the backend is tensorrt_llm, and before quantize sensitivity where a
    recipe is solved. What a stage made is kept in a store,
    <output>/store, and used again as long as its settings and inputs stay the same; a run that was stopped goes on
    where it was. <output>/<name> shows the results.

    Leaves with 12 where the engine has to be built on another host: what that takes is ready, and is said.
    """
    from pipeline.cli.source import check_source
    from pipeline.progress import make_reporter
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages

    config = read_config(config_file, overrides)
    stages, force = _take(resume, config, load_stages(), force)
    reporter = make_reporter()
    source = check_source(config)
    for note in source.host_notes:  # before hours of work that ends here
        reporter.note(note)
    executor = Executor(config, stages, reporter)
    try:
        made = executor.run(start=start, until=until, force=force)
    except GateError:
        report_run(config)
        raise
    except PendingError as pending:
        report_run(config)
        _tell_way_on(executor, config, [config_file, *(f"--set={override}" for override in overrides)], pending)
        ctx.exit(pending.exit_code)
    page = report_run(config) if "verify" in made else None  # once there is a proof to show
    _list_results(config, made, page)
    outcomes = executor.folder.read()
    if any(outcomes.get(stage, {}).get("state") == "made" for stage in made):  # told once: `plan` says it again
        for note in source.notes:
            click.echo(f"note: {note}", err=True)


def _take(
    engine: Path | None, config: Config, stages: Sequence[Stage], force: tuple[str, ...]
) -> tuple[Sequence[Stage], tuple[str, ...]]:
    """The stages, and those to force, with `engine` in the place of what build would make."""
    if engine is None:
        return stages, force
    if config.target.backend != "tensorrt_llm":
        raise click.UsageError(f"--resume takes engines of backend tensorrt_llm, and this is {config.target.backend}")
    from dataclasses import replace

    from pipeline.stages.foreign_build import take_tensorrt_llm

    run = take_tensorrt_llm(engine)
    taken = [replace(stage, run=run, forced_by="--resume") if stage.name == "build" else stage for stage in stages]
    return taken, (*force, "build")


def _list_results(config: Config, made: Iterable[str], page: Path | None = None) -> None:
    width = max(map(len, made), default=0)
    for stage in made:
        click.echo(f"{stage.ljust(width)}  {config.run_folder / stage}")
    if page is not None:
        click.echo(f"{'report'.ljust(width)}  {page}")


def _tell_way_on(executor: Executor, config: Config, arguments: Sequence[str], pending: PendingError) -> None:
    """What to do next, in commands to be copied. `arguments`: what made the config what it is."""
    job, gpu = config.run_folder / "job", config.target.gpu
    shown = [stage.name for stage in executor.stages if (config.run_folder / stage.name).exists()]
    _list_results(config, shown)
    size = format_bytes(sum(file.stat().st_size for file in job.rglob("*") if file.is_file()))
    there, back = f"{config.name}-job", f"{config.name}-engine"
    steps = {
        f"copy the job to a host with the {gpu}": f"rsync -rL --chmod=u+w {job}/ HOST:{there}/",
        "build there, in docker or within the container": f"ssh HOST 'cd {there} && ./build.sh engine'",
        "bring the engine back": f"rsync -r HOST:{there}/engine/ {back}/",
        "go on here": f"{_name_program()} engine {shlex.join(arguments)} --resume {back}",
    }
    click.echo(
        f"\nNothing failed: {pending.message}.\n{job} ({size}) is all that building it takes. What to do next:\n"
    )
    for number, (step, command) in enumerate(steps.items(), 1):
        click.echo(f"  {number}. {step}:\n       {command}")
    click.echo(f"\n{job / 'README.md'} says it to whoever builds there. This run leaves with {pending.exit_code}.")


def _name_program() -> str:
    """As it was called: a path where it is not found by name."""
    return "trtseek" if shutil.which("trtseek") else sys.argv[0]
