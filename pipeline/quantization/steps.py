"""The resumable steps of a quantization, each of which writes a shard: one per decoder layer, one for what surrounds
them, one per layer for multi-token prediction. What a step has to say of its shard is kept until all are finished.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.shards import Shard
from pipeline.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.workspace import Workspace

PARTS = "parts"  # the folder of what finished steps say
LAYER = re.compile(r"transformer\.(mtp_)?layers\.(\d+)\.")  # of which a tensor is


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a step says of its shard: rows of the report by linear, the layer's experts and coverage."""

    linears: dict[str, dict[str, Any]]
    experts: dict[str, Any] | None
    coverage: dict[str, dict[str, float]]


class Steps:
    """The steps by name, in the order of their shards, each with its tensors' names. `layers`: the decoder's; `copied`:
    the others, which measure nothing."""

    def __init__(self, source: CheckpointFolder, workspace: Workspace) -> None:
        self.workspace = workspace
        self.layers = [f"layer-{layer}" for layer in range(source.architecture.num_layers)]
        self.tensors: dict[str, list[str]] = {step: [] for step in (*self.layers, "outer")}
        for name in source.tensors:
            found = LAYER.match(name)
            step = f"{'mtp' if found[1] else 'layer'}-{found[2]}" if found else "outer"
            self.tensors.setdefault(step, []).append(name)
        self.copied = list(self.tensors)[len(self.layers) :]

    def left(self, steps: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Those of some steps that are not finished, with their places among these."""
        return ((i, step) for i, step in enumerate(steps) if not self.workspace.is_done(step))

    def shard(self, step: str) -> Path:
        names = list(self.tensors)
        return self.workspace.path / f"model-{names.index(step) + 1:05}-of-{len(names):05}.safetensors"

    def finish(self, step: str, infos: Sequence[TensorInfo], part: Part) -> None:
        """`infos`: what was written into its shard."""
        path = self._record(step)
        path.parent.mkdir(exist_ok=True)
        listed = [(info.name, info.dtype, info.shape) for info in infos]
        path.write_text(json.dumps({"infos": listed, **asdict(part)}), encoding="utf-8")
        self.workspace.finish(step, [self.shard(step), path])

    def read(self) -> tuple[list[Shard], list[Part]]:
        """Of all steps, once they are finished."""
        shards, parts = [], []
        for step in self.tensors:
            record = json.loads(self._record(step).read_text(encoding="utf-8"))
            infos = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in record.pop("infos"))
            shards.append(Shard(name=self.shard(step).name, infos=infos))
            parts.append(Part(**record))
        return shards, parts

    def _record(self, step: str) -> Path:
        return self.workspace.path / PARTS / f"{step}.json"
