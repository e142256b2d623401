"""A folder of safetensors shards with a config.json: a Hugging Face checkpoint, or one of our own.

Opening reads headers only, and checks them against each other. Nothing in the folder is ever executed: `auto_map` is
ignored, pickles are refused.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.own_key import OwnKey, parse_own_key
from pipeline.checkpoint.safetensors_file import SafetensorsFile
from pipeline.checkpoint.shard_index import CONFIG, FORM, INDEX, SINGLE, check_index, find_shards
from pipeline.checkpoint.strict_json import read_json
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"
# Everything the tokenizers and transformers libraries may look for.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class CheckpointFolder:
    """A TensorSource over all shards of a folder. `tensors` goes shard by shard, each in its header's order.

    `own`: what an engine checkpoint says of itself; None of a Hugging Face folder."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self.architecture: Architecture = parse_architecture(config, str(path / CONFIG))
        self.own: OwnKey | None = parse_own_key(config, str(path / CONFIG))
        self._shards = files
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            tensors |= file.tensors
        self.tensors: Mapping[str, TensorInfo] = tensors

    @classmethod
    def open(cls, path: Path) -> CheckpointFolder:
        """Raises CheckpointError, naming the file, for whatever is missing, damaged, contradictory or a pickle."""
        if not path.is_dir():
            what = "is no folder" if path.exists() else "there is no such folder"
            raise CheckpointError(f"{path}: {what}", hint=FORM)
        with _without_collection():
            places = find_shards(path)
            config = read_json(path / CONFIG)
            names = [SINGLE] if places is None else sorted(set(places.values()))
            files = [SafetensorsFile(path / name) for name in names]
            if places is not None:
                check_index(files, places)
            return cls(path, config, files)

    @property
    def files(self) -> list[Path]:
        """Every file the checkpoint consists of: config, index, shards, generation config, tokenizer."""
        others = [self.path / name for name in (CONFIG, INDEX, GENERATION_CONFIG)]
        return [f for f in others if f.is_file()] + self.shards + self.tokenizer_files

    @property
    def shards(self) -> list[Path]:
        return [shard.path for shard in self._shards]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(shard.nbytes for shard in self._shards)

    @property
    def tokenizer_files(self) -> list[Path]:
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def copy_companions(self, folder: Path) -> list[Path]:
        """Copies what goes with any form of the weights, generation config and tokenizer; returns the copies."""
        companions = [path for path in (self.path / GENERATION_CONFIG, *self.tokenizer_files) if path.is_file()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in companions]

    def read(self, name: str) -> RawTensor:
        """A view of the mapped file. Raises CheckpointError for a name that no shard has."""
        return self._owner(name).read(name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Lets go of the resident pages of a tensor's bytes [begin, end), so that reading on does not add up."""
        self._owner(name).release(name, begin, end)

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return self._owner(name).path

    @cached_property
    def _owners(self) -> dict[str, SafetensorsFile]:
        return {name: file for file in self._shards for name in file.tensors}

    def _owner(self, name: str) -> SafetensorsFile:
        if name not in self._owners:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        return self._owners[name]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Headers make a hundred thousand objects and no cycles; the collector would go through them all repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
