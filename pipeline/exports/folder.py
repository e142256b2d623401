"""A plan written as a folder of safetensors shards, as the hub has it: as a stream, and whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pipeline.checkpoint.engine_config import write_exported
from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.shards import METADATA, plan_shards, write_index
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.exports.plan import Plan
    from pipeline.progress import Progress


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write into that is `output` once the block is left; nothing is left of it after an error.

    Raises CheckpointError where `output` exists."""
    if output.exists():
        raise CheckpointError(f"{output} exists already", hint="name a folder that does not exist yet")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}-{uuid4().hex}")
    partial.mkdir()
    try:
        yield partial
        if output.exists():  # since we looked: another export of the same name
            raise CheckpointError(f"{output} was made meanwhile", hint="name a folder that does not exist yet")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(
    plan: Plan,
    folder: Path,
    quantization: Mapping[str, Any] | None,
    files: Mapping[str, Mapping[str, Any]],
    progress: Progress,
) -> None:
    """`quantization`: config.json's quantization_config. `files`: further JSON files, by name."""
    shards = plan_shards([info for entry in plan.entries for info in entry.infos])
    tensors = iterate_tensors(plan, progress)
    for shard in shards:
        write_safetensors(folder / shard.name, shard.infos, (next(tensors) for _ in shard.infos), metadata=METADATA)
    if next(tensors, None) is not None:  # and what the last tensor was made of is let go of
        raise ValueError(f"{folder}: more tensors than the plan declares")
    write_index(folder, shards)
    write_exported(plan.engine, folder, quantization)
    plan.engine.copy_companions(folder)
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def iterate_tensors(plan: Plan, progress: Progress) -> Iterator[RawTensor]:
    """The export's tensors in the order of its entries; what was read for one is let go of before the next."""
    sizes = {name: info.nbytes for name, info in plan.engine.tensors.items()}
    progress.start("writing", sum(sizes.values()), "B")
    for entry in plan.entries:
        yield from entry.make()
        for name in entry.sources:
            plan.engine.release(name)
            progress.advance(sizes[name])
