"""An engine checkpoint made from a fixture, and a source that lies about some of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.evaluation.subject import Subject, describe_subject
from pipeline.workspace import FolderWorkspace


def convert(source: Path, output: Path, dtype: str = "float32") -> CheckpointFolder:
    convert_checkpoint(CheckpointFolder.open(source), FolderWorkspace(output), dtype=dtype, overflow="refuse")
    return CheckpointFolder.open(output)


class Altered:
    """A TensorSource whose tensors go through `edits`, by name: what a faulty conversion or packing would give."""

    def __init__(self, source: CheckpointFolder, edits: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.source, self.edits = source, edits
        self.tensors: Mapping[str, TensorInfo] = source.tensors
        self.config, self.architecture = source.config, source.architecture

    def read(self, name: str) -> RawTensor:
        raw = self.source.read(name)
        if name not in self.edits:
            return raw
        return RawTensor.from_torch(self.edits[name](raw.to_torch().clone()))


def subject(
    folder: CheckpointFolder, edits: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None
) -> Subject:
    """A checkpoint to measure, some of its tensors edited."""
    described = describe_subject(folder, "edited" if edits else "original")
    if not edits:
        return described
    return dataclasses.replace(described, source=Altered(folder, edits))
