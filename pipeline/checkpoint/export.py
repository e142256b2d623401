"""The engine checkpoint back to Hugging Face's names: a whole folder bit for bit, or one layer for the reference.

For proofs and calibration a quantized linear comes back as the float32 matrix that it stands for, its pre-quantization
scale (arXiv 2306.00978 §3.2) multiplied into the input columns, so that transformers' module, which knows of no scale,
computes the same function; where inputs are quantized too, the same but for their rounding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.block_scales import is_block_scaled, read_weight
from pipeline.checkpoint.engine_config import read_own_key, write_exported
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layer_state import LayerState
from pipeline.checkpoint.layouts import Mapping, layout_for
from pipeline.checkpoint.layouts.scales import CHANNEL_SCALES, PRESCALE, WEIGHT_SCALES, find_format, scale_mapping
from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.shards import METADATA, plan_shards, write_index
from pipeline.checkpoint.tensors import RawTensor, TensorInfo, TensorSource
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def hf_layer_state(source: TensorSource, architecture: Architecture, layer: int) -> LayerState:
    """Decoder layer `layer` under HF's on-disk names relative to it ("self_attn.q_proj.weight", …).

    Weights share memory with the checkpoint's mapping (do not write to them); quantized ones are dequantized to
    float32, those of routed experts each time that they are asked for.
    Raises CheckpointError for a tensor that the checkpoint lacks or holds in another shape (an expert's: when read).
    """
    mappings = [m for m in layout_for(architecture).layer_mappings(layer) if _is_there(source, m)]
    return LayerState(f"model.layers.{layer}.", mappings, lambda m: m.backward(_read_weight(source, m)))


def hf_outer_state(source: TensorSource, architecture: Architecture) -> dict[str, torch.Tensor]:
    """What surrounds the layers: model.embed_tokens.weight, model.norm.weight, and lm_head.weight unless it is tied."""
    return _read_state(source, layout_for(architecture).outer_mappings())


def export_checkpoint(engine: CheckpointFolder, output: Path) -> None:
    """Writes an unquantized engine checkpoint as a HF folder: tensors byte for byte, config.json without our key.

    `output` must not exist; it appears whole or not at all. Raises CheckpointError.
    """
    read_own_key(engine, hint="export the folder that the convert stage wrote, before quantization")
    if output.exists():
        raise CheckpointError(f"{output} exists already", hint="name a folder that does not exist yet")
    mappings = list(_list_stored(engine))
    infos = {info.name: info for m in mappings for info in _source_infos(engine, m)}
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}-{uuid4().hex}")
    partial.mkdir()
    try:
        _write_folder(engine, mappings, list(infos.values()), partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _list_stored(engine: CheckpointFolder) -> Iterator[Mapping]:
    """The mappings whose targets are there, each weight in FP8 blocks followed by its scales'."""
    for mapping in layout_for(engine.architecture).mappings():
        if _is_there(engine, mapping):
            yield mapping
            if is_block_scaled(engine, mapping.target):
                yield scale_mapping(mapping)


def _write_folder(engine: CheckpointFolder, mappings: list[Mapping], infos: list[TensorInfo], folder: Path) -> None:
    shards = plan_shards(infos)
    parts = _iterate_parts(engine, mappings)
    for shard in shards:
        tensors = (next(parts) for _ in shard.infos)
        write_safetensors(folder / shard.name, shard.infos, tensors, metadata=METADATA)
    write_index(folder, shards)
    write_exported(engine, folder)
    engine.copy_companions(folder)


def _iterate_parts(engine: CheckpointFolder, mappings: Sequence[Mapping]) -> Iterator[RawTensor]:
    """The source tensors as they are cut from the engine's: rows of a row-major matrix are a run of its bytes."""
    for mapping in mappings:
        whole = engine.read(mapping.target)
        start = 0
        for info in _source_infos(engine, mapping):
            yield RawTensor(info.dtype, info.shape, whole.data[start : start + info.nbytes])
            start += info.nbytes
        engine.release(mapping.target)


def _source_infos(engine: CheckpointFolder, mapping: Mapping) -> list[TensorInfo]:
    info = engine.tensors.get(mapping.target)
    if info is None:
        raise CheckpointError(f"the engine checkpoint lacks {mapping.target}", hint="convert again")
    if info.shape != mapping.target_shape:
        raise _misshapen(mapping, info)
    named = zip(mapping.sources, mapping.source_shapes, strict=True)
    return [TensorInfo(name, info.dtype, shape) for name, shape in named]


def _read_state(source: TensorSource, mappings: Sequence[Mapping]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for mapping in mappings:
        if not _is_there(source, mapping):
            continue
        whole = _read_weight(source, mapping)
        state.update(zip(mapping.sources, mapping.backward(whole), strict=True))
    return state


def _read_weight(source: TensorSource, mapping: Mapping) -> torch.Tensor:
    base = mapping.target.removesuffix(".weight")
    stored = find_format(source.tensors, base)
    weight = _DEQUANTIZE[stored](source, base) if stored in _DEQUANTIZE else read_weight(source, mapping.target)
    if tuple(weight.shape) != mapping.target_shape:
        raise _misshapen(mapping, source.tensors[mapping.target])
    return weight


def _dequantize_int4(source: TensorSource, base: str) -> torch.Tensor:
    from pipeline.quantization.int4 import dequantize

    packed, scales = (source.read(f"{base}.{kind}").to_torch() for kind in ("weight", WEIGHT_SCALES))
    return _prescaled(source, base, dequantize(packed, scales))


def _dequantize_rows(source: TensorSource, base: str, scales: str) -> torch.Tensor:
    """8-bit numbers [out, in] with a scale for each row, or one for all."""
    return source.read(f"{base}.weight").to_torch().float() * source.read(f"{base}.{scales}").to_torch()[:, None]


def _prescaled(source: TensorSource, base: str, weight: torch.Tensor) -> torch.Tensor:
    name = f"{base}.{PRESCALE}"
    return weight.mul_(source.read(name).to_torch().float()) if name in source.tensors else weight


# How a linear of each format becomes float32 [out, in]; FP8 blocks are block_scales' business.
_DEQUANTIZE: dict[str | None, Callable[[TensorSource, str], torch.Tensor]] = {
    "int4": _dequantize_int4,
    "fp8": lambda source, base: _dequantize_rows(source, base, WEIGHT_SCALES),
    "int8": lambda source, base: _dequantize_rows(source, base, CHANNEL_SCALES),
    "int8_sq": lambda source, base: _prescaled(source, base, _dequantize_rows(source, base, WEIGHT_SCALES)),
}


def _is_there(source: TensorSource, mapping: Mapping) -> bool:
    if mapping.target in source.tensors:
        return True
    if mapping.optional:
        return False
    raise CheckpointError(
        f"the engine checkpoint lacks {mapping.target}", hint="convert again; the folder is damaged or incomplete"
    )


def _misshapen(mapping: Mapping, info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{mapping.target} is {info.dtype}{list(info.shape)}, config.json asks for {list(mapping.target_shape)}",
        hint="convert again; the folder is damaged or its config.json was changed",
    )
