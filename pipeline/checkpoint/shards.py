"""Cutting a checkpoint into files, with the names and the index that the hub and `transformers` use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.shard_index import INDEX
from pipeline.checkpoint.tensors import TensorInfo

MAX_SHARD = 2_000_000_000  # bytes: what a killed conversion repeats at most
METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file to be: its name, and its tensors in order."""

    name: str
    infos: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


def plan_shards(infos: Sequence[TensorInfo], limit: int = MAX_SHARD) -> list[Shard]:
    """Cuts, in order, into files of at most `limit` bytes; a tensor larger than that gets a file of its own."""
    groups: list[list[TensorInfo]] = []
    room = -1
    for info in infos:
        if info.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(info)
        room -= info.nbytes
    count = len(groups)
    return [
        Shard(name=f"model-{i:05}-of-{count:05}.safetensors", infos=tuple(group)) for i, group in enumerate(groups, 1)
    ]


def write_index(folder: Path, shards: Sequence[Shard]) -> Path:
    """Writes model.safetensors.index.json."""
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {info.name: shard.name for shard in shards for info in shard.infos},
    }
    path = folder / INDEX
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path
