"""Names of the scales that go with quantized weights, and the shapes of those of FP8 blocks.

On the hub `X.weight` F8_E4M3 [O, I] goes with `X.weight_scale_inv` F32 [ceil(O/128), ceil(I/128)], which despite its
name multiplies. The engine checkpoint uses TensorRT-LLM's names.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.checkpoint.layouts.rows import Mapping

BLOCK = 128
FP8 = "F8_E4M3"
SOURCE_SUFFIX = "_scale_inv"  # after "X.weight"
# After "X." in an engine checkpoint, and of the network's constants.
WEIGHT_SCALES = "weights_scaling_factor"  # F32 [O, I/g] of INT4
PRESCALE = "prequant_scaling_factor"  # what a linear's input is multiplied by before INT4 weights
BLOCK_SCALES = "weights_block_scaling_factor"
CONFIG_KEY = "fp8_blocks"  # of an engine checkpoint's own part of config.json: the size of its blocks
ROLE = "block_scale"  # of the mappings that `scale_mapping` makes


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
