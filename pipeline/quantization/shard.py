"""One shard of a quantized checkpoint: declared whole, then streamed tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.shards import METADATA
from pipeline.checkpoint.tensors import SAFETENSORS_DTYPE, RawTensor, TensorInfo
from pipeline.quantization.folding import describe_vector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.progress import Progress
    from pipeline.quantization.layer import LayerPlan
    from pipeline.quantization.methods import Format
    from pipeline.quantization.rules import Linear


def write_shard(
    path: Path,
    names: Sequence[str],
    source: CheckpointFolder,
    linears: Mapping[str, Linear],
    plan: LayerPlan,
    form: Format,
    progress: Progress,
) -> list[TensorInfo]:
    """Writes the source tensors `names`, those of `linears` quantized, and returns what the shard holds."""
    infos = [info for name in names for info in _describe(source.tensors[name], linears, plan, form)]
    write_safetensors(path, infos, _make(names, source, linears, plan, form, progress), metadata=METADATA)
    return infos


def _describe(info: TensorInfo, linears: Mapping[str, Linear], plan: LayerPlan, form: Format) -> list[TensorInfo]:
    linear = _linear_of(info.name, linears)
    if linear is None:
        return [info]
    infos = form.describe(linear)
    if linear.name in plan.adjustments.vectors:
        dtype = SAFETENSORS_DTYPE[str(plan.adjustments.dtype).removeprefix("torch.")]
        infos.append(describe_vector(linear.name, linear.shape[1], dtype))
    return infos


def _make(
    names: Sequence[str],
    source: CheckpointFolder,
    linears: Mapping[str, Linear],
    plan: LayerPlan,
    form: Format,
    progress: Progress,
) -> Iterator[RawTensor]:
    adjustments = plan.adjustments
    for name in names:
        linear = _linear_of(name, linears)
        if linear is None:
            yield adjustments.apply_16bit(name, source.read(name))
        else:
            weight = adjustments.apply(name, source.read(name).to_torch())
            limits = adjustments.apply_limits(linear.name, plan.limits.get(linear.name))
            yield from form.pack(linear, weight, limits, adjustments.dtype)
            if linear.name in adjustments.vectors:
                yield RawTensor.from_torch(adjustments.vectors[linear.name])
        source.release(name)
        progress.advance(source.tensors[name].nbytes)


def _linear_of(tensor: str, linears: Mapping[str, Linear]) -> Linear | None:
    return linears.get(tensor.removesuffix(".weight")) if tensor.endswith(".weight") else None


def model_dtype(name: str) -> torch.dtype:
    """ "float16" → torch.float16."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no torch type")
    return dtype
