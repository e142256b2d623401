"""One shard of a quantized checkpoint: declared whole, then streamed tensor by tensor.

What is stored in FP8 blocks is packed straight from them, or passed on; a decoder's weight that is not quantized
becomes one of the model's type, so that the engine needs no FP8. Layers that are no part of the network stay as they
are.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.block_scales import open_rows, read_weight
from pipeline.checkpoint.layouts.rows import MTP_PREFIX
from pipeline.checkpoint.layouts.scales import BLOCK_SCALES, FP8, target_scale
from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.shards import METADATA
from pipeline.checkpoint.tensors import SAFETENSORS_DTYPE, RawTensor, TensorInfo
from pipeline.progress import SILENT
from pipeline.quantization.folding import describe_vector
from pipeline.quantization.formats import FORMATS
from pipeline.quantization.problem import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.progress import Progress
    from pipeline.quantization.folding import Adjustments
    from pipeline.quantization.int4 import Rows
    from pipeline.quantization.layer import LayerPlan
    from pipeline.quantization.rules import Linear


def write_shard(
    path: Path,
    names: Sequence[str],
    source: CheckpointFolder,
    linears: Mapping[str, Linear],
    plan: LayerPlan,
    progress: Progress,
) -> list[TensorInfo]:
    """Writes the source tensors `names`, those of `linears` quantized, and returns what the shard holds."""
    kept = [name for name in names if not _is_scale_of_widened(name)]
    infos = [info for name in kept for info in _describe(source.tensors[name], linears, plan)]
    added = {name: RawTensor.from_torch(tensor) for name, tensor in plan.added.items()}
    infos += [TensorInfo(name, raw.dtype, raw.shape) for name, raw in added.items()]
    tensors = chain(_make(kept, source, linears, plan, progress), added.values())
    write_safetensors(path, infos, tensors, metadata=METADATA)
    return infos


def make_tensors(
    names: Sequence[str], source: CheckpointFolder, linears: Mapping[str, Linear], plan: LayerPlan
) -> Iterator[tuple[TensorInfo, RawTensor]]:
    """What `write_shard` would write of these tensors."""
    kept = [name for name in names if not _is_scale_of_widened(name)]
    infos = [info for name in kept for info in _describe(source.tensors[name], linears, plan)]
    return zip(infos, _make(kept, source, linears, plan, SILENT), strict=True)


def _describe(info: TensorInfo, linears: Mapping[str, Linear], plan: LayerPlan) -> list[TensorInfo]:
    linear = _linear_of(info.name, linears)
    dtype = SAFETENSORS_DTYPE[str(plan.adjustments.dtype).removeprefix("torch.")]
    if linear is None:
        return [TensorInfo(info.name, dtype, info.shape) if _is_widened(info) else info]
    infos = FORMATS[linear.format].describe(linear)
    if linear.name in plan.adjustments.vectors:
        infos.append(describe_vector(linear.name, linear.shape[1], dtype))
    return infos


def _make(
    names: Sequence[str],
    source: CheckpointFolder,
    linears: Mapping[str, Linear],
    plan: LayerPlan,
    progress: Progress,
) -> Iterator[RawTensor]:
    adjustments = plan.adjustments
    for name in names:
        linear = _linear_of(name, linears)
        if linear is None and _is_widened(source.tensors[name]):
            yield adjustments.round(name, read_weight(source, name))
        elif linear is None:
            yield adjustments.apply_16bit(name, source.read(name))
        elif _is_passed_on(linear, source, adjustments):
            yield source.read(name)
            yield source.read(target_scale(name))
        else:
            weight: Rows
            if source.tensors[name].dtype == FP8 and not adjustments.touches(name):
                weight = open_rows(source, name)
            else:
                weight = adjustments.apply(name, read_weight(source, name))
            treatment = adjustments.apply_treatment(linear.name, plan.treatments.get(linear.name, PLAIN))
            yield from FORMATS[linear.format].pack(linear, weight, treatment, adjustments.dtype)
            if linear.name in adjustments.vectors:
                yield RawTensor.from_torch(adjustments.vectors[linear.name])
        source.release(name)
        progress.advance(source.tensors[name].nbytes)


def _is_passed_on(linear: Linear, source: CheckpointFolder, adjustments: Adjustments) -> bool:
    """Whether a linear is in FP8 blocks and is to be: rounded anew, it would only lose."""
    name = f"{linear.name}.weight"
    return linear.format == "fp8_blocks" and source.tensors[name].dtype == FP8 and not adjustments.touches(name)


def _is_widened(info: TensorInfo) -> bool:
    return info.dtype == FP8 and not info.name.startswith(MTP_PREFIX)


def _is_scale_of_widened(name: str) -> bool:
    return name.endswith(BLOCK_SCALES) and not name.startswith(MTP_PREFIX)


def _linear_of(tensor: str, linears: Mapping[str, Linear]) -> Linear | None:
    return linears.get(tensor.removesuffix(".weight")) if tensor.endswith(".weight") else None


def model_dtype(name: str) -> torch.dtype:
    """ "float16" → torch.float16."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no torch type")
    return dtype
