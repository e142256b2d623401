"""trtseek refit ENGINE --checkpoint FOLDER: weights for an engine that was built without."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="refit")
@click.argument("engine", metavar="ENGINE", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--checkpoint",
    required=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The engine checkpoint that it was built from: quantize, or convert where nothing is quantized.",
)
@click.option("--output", metavar="FOLDER", type=click.Path(path_type=Path), help="New folder for the whole engine.")
@click.option("--check", is_flag=True, help="Only compare engine and checkpoint, which needs no GPU.")
def command(engine: Path, checkpoint: Path, output: Path | None, check: bool) -> None:
    """Bring the weights to an engine built with `stages.build.weights: stripped`.

    ENGINE is the folder that build made: model.engine, engine.json, refit.json. Runs on the GPU host. The weights are
    made from the checkpoint one at a time, each compared with what was built and proved.
    """
    from pipeline.engine.refit import check_refit, refit_engine
    from pipeline.progress import make_reporter

    if check == (output is not None):
        raise click.UsageError("give either --output or --check")
    reporter = make_reporter()
    reporter.begin("refit")
    if output is None:
        made = check_refit(engine, checkpoint, reporter)
        reporter.end(f"{len(made.constants)} constants are those that the engine was built for")
    else:
        refit_engine(engine, checkpoint, output, reporter)
        reporter.end("done")
        click.echo(output)
