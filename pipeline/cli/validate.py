"""trtseek validate CONFIG: is the config right, and can the model, the target and the settings work together?"""

from __future__ import annotations

import click

from pipeline.cli.options import config_argument, json_option, print_json, read_config
from pipeline.cli.tables import format_bytes


@click.command(name="validate")
@config_argument
@json_option
def command(config_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a config against its schema, its model and its target.

    Reads the checkpoint's headers, of linears that are quantized already their scales too, and holds config.json
    against them. Leaves with 2 for a mistake in the config, 3 for one in the checkpoint, 4 for a combination that
    cannot work or is not part of this version.
    """
    from pipeline.checkpoint.headers import TOKENIZER
    from pipeline.checkpoint.text import compare_vocabulary
    from pipeline.cli.source import check_source

    config = read_config(config_file, overrides)
    source = check_source(config, keep=False)
    architecture, nbytes = source.headers.architecture, source.headers.nbytes
    few = compare_vocabulary(config.model.path / TOKENIZER, architecture.vocab_size)
    notes = [*source.notes, *([few] if few else [])]
    if as_json:
        print_json(
            {
                "config": config.model_dump(mode="json"),
                "model": {
                    "architecture": architecture.name,
                    "layers": architecture.num_layers,
                    "dtype": architecture.dtype,
                    "tensors": source.headers.count,
                    "bytes": nbytes,
                },
                "notes": notes,
            }
        )
        return
    click.echo(
        f"{config.name}: valid. {config.model.path}: {architecture.name}, {architecture.num_layers} layers, "
        f"{source.headers.count} tensors, {format_bytes(nbytes)}"
    )
    for note in notes:
        click.echo(f"  note: {note}")
