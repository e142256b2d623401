"""Why a format has no exact place for a linear, where more than one format has the same reason: the reason, or None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import BLOCK
from pipeline.quantization.selection import HEAD

if TYPE_CHECKING:
    from pipeline.exports.linear import QuantizedLinear


# Of FP8 with a scale for each output, which readers of modelopt's layout take where there is one of each linear.
NO_STEP = "its FP8 weights have no static scale of their input"
PER_OUTPUT = "its FP8 weights have a scale for each output"
CUT_BLOCKS = f"blocks of {BLOCK} rows reach over its parts"


def refuse_prescaled(linear: QuantizedLinear) -> str | None:
    if linear.is_prescaled:
        return (
            "its input is multiplied by a vector that no norm or linear before it could take up (the quantize stage "
            "folded what could be); method gptq or rtn makes none"
        )
    return None


def refuse_head(linear: QuantizedLinear) -> str | None:
    return "readers of the format take an output head of 16 bits" if linear.mapping.role == HEAD else None


def refuse_wide_scales(linear: QuantizedLinear) -> str | None:
    """For formats whose scales are float16. Reads the scales."""
    scales = linear.read_scales()
    return None if scales.half().float().equal(scales) else "some of its scales are no float16"


def refuse_cut_blocks(linear: QuantizedLinear) -> str | None:
    """Of what is one linear in the engine and several on the hub, each must begin with a block."""
    if any(part.rows.start % BLOCK for part in linear.parts):
        return CUT_BLOCKS
    return None
