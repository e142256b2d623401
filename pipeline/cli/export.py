"""trtseek export FOLDER OUTPUT: an engine checkpoint back to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="export")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUTPUT", type=click.Path(path_type=Path))
def command(folder: Path, output: Path) -> None:
    """Write the engine checkpoint in FOLDER, which convert made, as a Hugging Face checkpoint in OUTPUT.

    Where convert kept the type, every tensor and config.json come back bit for bit.
    """
    from pipeline.checkpoint.export import export_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder

    export_checkpoint(CheckpointFolder.open(folder), output)
    click.echo(output)
