"""The engine checkpoint under Hugging Face's names again, layer by layer: what the reference computes with.

A quantized linear comes back as the float32 matrix that it stands for, its pre-quantization scale (arXiv 2306.00978
§3.2) multiplied into the input columns, so that transformers' module, which knows of no scale, computes the same
function; where inputs are quantized too, the same but for their rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.block_scales import read_weight
from pipeline.checkpoint.layer_state import LayerState
from pipeline.checkpoint.layouts import Mapping, layout_for
from pipeline.checkpoint.layouts.scales import CHANNEL_SCALES, PRESCALE, WEIGHT_SCALES, ZEROS, find_format
from pipeline.checkpoint.tensors import TensorInfo, TensorSource
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
    return LayerState(f"model.layers.{layer}.", mappings, lambda m: m.backward(read_dense(source, m)))


def hf_outer_state(source: TensorSource, architecture: Architecture) -> dict[str, torch.Tensor]:
    """What surrounds the layers: model.embed_tokens.weight, model.norm.weight, and lm_head.weight unless it is tied."""
    state: dict[str, torch.Tensor] = {}
    for mapping in layout_for(architecture).outer_mappings():
        if not _is_there(source, mapping):
            continue
        whole = read_dense(source, mapping)
        state.update(zip(mapping.sources, mapping.backward(whole), strict=True))
    return state


def read_dense(source: TensorSource, mapping: Mapping) -> torch.Tensor:
    """The target of a mapping as the matrix it stands for, float32 where it is quantized, else as it is stored.

    Raises CheckpointError where its shape is not the mapping's.
    """
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


def _dequantize_int4_zeros(source: TensorSource, base: str) -> torch.Tensor:
    from pipeline.quantization.int4 import dequantize

    return dequantize(*(source.read(f"{base}.{kind}").to_torch() for kind in ("weight", WEIGHT_SCALES, ZEROS)))


def _dequantize_rows(source: TensorSource, base: str, scales: str) -> torch.Tensor:
    """8-bit numbers [out, in] with a scale for each row, or one for all."""
    return source.read(f"{base}.weight").to_torch().float() * source.read(f"{base}.{scales}").to_torch()[:, None]


def _prescaled(source: TensorSource, base: str, weight: torch.Tensor) -> torch.Tensor:
    name = f"{base}.{PRESCALE}"
    return weight.mul_(source.read(name).to_torch().float()) if name in source.tensors else weight


# How a linear of each format becomes float32 [out, in]; FP8 blocks are block_scales' business.
_DEQUANTIZE: dict[str | None, Callable[[TensorSource, str], torch.Tensor]] = {
    "int4": _dequantize_int4,
    "int4_fp8": _dequantize_int4,
    "int4_zeros": _dequantize_int4_zeros,
    "fp8": lambda source, base: _dequantize_rows(source, base, WEIGHT_SCALES),
    "fp8_rows": lambda source, base: _dequantize_rows(source, base, CHANNEL_SCALES),
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
