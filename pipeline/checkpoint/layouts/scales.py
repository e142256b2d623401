"""Names of the scales that go with quantized weights, which format they say a weight is in, and the shapes of those of
FP8 blocks.

On the hub `X.weight` F8_E4M3 [O, I] goes with `X.weight_scale_inv` F32 [ceil(O/128), ceil(I/128)], which despite its
name multiplies. The engine checkpoint uses TensorRT-LLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.rows import Mapping

if TYPE_CHECKING:
    from pipeline.checkpoint.tensors import TensorInfo

BLOCK = 128
FP8 = "F8_E4M3"
INT8 = "I8"
SOURCE_SUFFIX = "_scale_inv"  # after "X.weight"
# After "X." in an engine checkpoint, and of the network's constants.
WEIGHT_SCALES = "weights_scaling_factor"  # F32 [O, I/g] of INT4, [1] of FP8, [O] of SmoothQuant
WEIGHT_SCALES_2 = "weights_scaling_factor_2"  # F32 [1] of INT4 whose input is FP8: what its group scales are divided by
ZEROS = "zero"  # I8 [O, I/g] of INT4 with zero points, in [-8, 7]
CHANNEL_SCALES = "per_channel_scale"  # F32 [O] of INT8 weights alone, and of FP8
ACTIVATION_SCALES = "activation_scaling_factor"  # F32 [1], of an input that is quantized too
PRESCALE = "prequant_scaling_factor"  # what a linear's input is multiplied by before such weights
BLOCK_SCALES = "weights_block_scaling_factor"
# A layer's, after "transformer.layers.L.": F32 [1], one step of its quantized cache.
CACHE_SCALES = "attention.kv_cache_scaling_factor"
CONFIG_KEY = "fp8_blocks"  # of an engine checkpoint's own part of config.json: the size of its blocks
ROLE = "block_scale"  # of the mappings that `scale_mapping` makes

# The type of X.weight, and which of its scales there is: a format of quantization.catalog.FORMATS. The first counts.
SIGNATURES: tuple[tuple[str, str, str], ...] = (
    (FP8, BLOCK_SCALES, "fp8_blocks"),
    (FP8, CHANNEL_SCALES, "fp8_rows"),
    (FP8, ACTIVATION_SCALES, "fp8"),
    (INT8, ZEROS, "int4_zeros"),
    (INT8, WEIGHT_SCALES_2, "int4_fp8"),
    (INT8, ACTIVATION_SCALES, "int8_sq"),
    (INT8, CHANNEL_SCALES, "int8"),
    (INT8, WEIGHT_SCALES, "int4"),
)


def find_format(tensors: AbstractMapping[str, TensorInfo], base: str) -> str | None:
    """The format of the linear `base` (without ".weight") of an engine checkpoint; None where it is plain floats."""
    weight = tensors.get(f"{base}.weight")
    if weight is None or weight.dtype not in (FP8, INT8):
        return None
    for dtype, scales, name in SIGNATURES:
        if weight.dtype == dtype and f"{base}.{scales}" in tensors:
            return name
    return None


def cache_scale(layer: int) -> str:
    """The engine checkpoint's name of the scale of a layer's quantized cache."""
    return f"transformer.layers.{layer}.{CACHE_SCALES}"


def source_scale(weight: str) -> str:
    """The hub's name of a weight's scales."""
    return weight + SOURCE_SUFFIX


def target_scale(weight: str) -> str:
    """The engine checkpoint's name of a weight's scales."""
    return f"{weight.removesuffix('.weight')}.{BLOCK_SCALES}"


def count_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


def scale_mapping(mapping: Mapping) -> Mapping:
    """The mapping of the scales that go with a weight's; a fused weight's are one below the other, too."""
    shapes = tuple(count_blocks(shape) for shape in mapping.source_shapes)
    return replace(
        mapping,
        target=target_scale(mapping.target),
        sources=tuple(source_scale(name) for name in mapping.sources),
        source_shapes=shapes,
        target_shape=(sum(shape[0] for shape in shapes), *shapes[0][1:]),
        role=ROLE,
        cast=False,
    )
