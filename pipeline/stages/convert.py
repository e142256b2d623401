"""convert: a Hugging Face checkpoint to an engine checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.stages.graph import Stage, StageContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config


# What of a model's folder is read; a model card or a picture beside it changes nothing.
READ = (".safetensors", ".json", ".jinja", ".model", "merges.txt")


def model_source(config: Config) -> Mapping[str, Sequence[Path]]:
    """The files of the model to start from; the folder itself where there are none, for the error to name."""
    folder = config.model.path
    files = sorted(path for path in folder.iterdir() if path.name.endswith(READ)) if folder.is_dir() else []
    return {"model": files or [folder]}


def _parameters(config: Config) -> Mapping[str, Any]:
    return config.stages.convert.model_dump(mode="json")


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.headers import TOKENIZER
    from pipeline.checkpoint.text import compare_vocabulary

    settings = context.config.stages.convert
    source = CheckpointFolder.open(context.config.model.path)
    # Here, since a run that is cached loads no library for it; a folder without one is refused before.
    tokenizer = source.path / TOKENIZER
    if tokenizer.is_file() and (few := compare_vocabulary(tokenizer, source.architecture.vocab_size)):
        context.progress.note(few)
    convert_checkpoint(
        source,
        context.workspace,
        dtype=settings.dtype,
        overflow=settings.overflow,
        foreign=settings.foreign,
        progress=context.progress,
    )


STAGE = Stage(
    name="convert",
    version=1,
    run=_run,
    sources=model_source,
    parameters=_parameters,
    libraries=("torch", "safetensors"),
)
