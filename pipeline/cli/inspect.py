"""trtseek inspect PATH: what a checkpoint, an engine, a model repository or a stage's output is, by its own files."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import json_option, print_json
from pipeline.cli.tables import print_fields


@click.command(name="inspect")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def command(path: Path, as_json: bool) -> None:
    """Say what is in PATH: a run's folder (out/NAME), the output of a stage, a checkpoint, TensorRT-LLM's rank
    checkpoints, an engine or its engine.json, a Triton model repository, a safetensors, GGUF or JSON file.

    Headers and structure only; needs no GPU and no TensorRT.
    """
    from pipeline.cli.inspection import describe

    document = describe(path)
    if as_json:
        print_json(document)
    else:
        print_fields(document)
