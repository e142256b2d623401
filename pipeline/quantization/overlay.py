"""An engine checkpoint with some linears quantized, in memory: what a candidate makes of one unit of a layer."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import BLOCK_SCALES
from pipeline.progress import SILENT
from pipeline.quantization.catalog import METHODS
from pipeline.quantization.layer import group_linears, plan_layer
from pipeline.quantization.shard import make_tensors

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import RawTensor, TensorInfo
    from pipeline.quantization.capture import Captured
    from pipeline.quantization.rules import Linear


class Overlay:
    """A TensorSource: `made` in front of what the checkpoint holds. A linear's scales in blocks go with its weight."""

    def __init__(self, source: CheckpointFolder, made: Mapping[str, tuple[TensorInfo, RawTensor]]) -> None:
        self.source, self.made = source, made
        infos = {name: info for name, (info, _) in made.items()}
        stale = {f"{name.removesuffix('.weight')}.{BLOCK_SCALES}" for name in made} - made.keys()
        kept = source.tensors
        if stale & kept.keys():
            kept = {name: info for name, info in kept.items() if name not in stale}
        self.tensors: Mapping[str, TensorInfo] = ChainMap(infos, dict(kept))

    def read(self, name: str) -> RawTensor:
        return self.made[name][1] if name in self.made else self.source.read(name)

    def nbytes(self, linears: Mapping[str, Linear]) -> int:
        """What these linears take: weights, scales and vectors."""
        return sum(info.nbytes for name, (info, _) in self.made.items() if name.rpartition(".")[0] in linears)


def lay_over(
    source: CheckpointFolder,
    layer: int,
    linears: Mapping[str, Linear],
    captured: Captured | None,
    *,
    dtype: torch.dtype,
    clip: bool,
    unrouted: str,
) -> Overlay:
    """Quantizes `linears` of one layer as the stage would, with what folding their scales does to other tensors."""
    prefix = f"transformer.layers.{layer}."
    names = [name for name in source.tensors if name.startswith(prefix)]
    groups = group_linears(source.architecture, layer, {name.removesuffix(".weight") for name in names}, linears)
    looks = captured if any(METHODS[method].measures for method, _ in groups) else None
    plan = plan_layer(layer, groups, linears, source, looks, dtype=dtype, clip=clip, unrouted=unrouted, progress=SILENT)
    touched = [name for name in names if name.removesuffix(".weight") in linears or plan.adjustments.touches(name)]
    made = {info.name: (info, raw) for info, raw in make_tensors(touched, source, linears, plan)}
    return Overlay(source, made)
