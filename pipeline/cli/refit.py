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

    ENGINE is the folder that build made: model.engine, engine.json, refit.json; of several ranks, the folder of all
    their folders, or of one. Runs on the GPU host. The weights are made from the checkpoint one at a time, each
    compared with what was built and proved.
    """
    from pipeline.engine.rank_engines import list_folders, write_joint
    from pipeline.engine.refit import check_refit, refit_engine
    from pipeline.progress import make_reporter

    if check == (output is not None):
        raise click.UsageError("give either --output or --check")
    reporter, folders = make_reporter(), list_folders(engine)
    reporter.begin("refit")
    if output is None:
        made = [check_refit(folder, checkpoint, reporter) for folder in folders]
        count = sum(len(each.constants) for each in made)
        ranks = f" of {len(folders)} ranks" if len(folders) > 1 else ""
        reporter.end(f"{count} constants{ranks} are those that the engine was built for")
        return
    whole = [refit_engine(each, checkpoint, output / each.relative_to(engine), reporter) for each in folders]
    if len(folders) > 1:
        write_joint(whole, output)
    reporter.end("done")
    click.echo(output)
