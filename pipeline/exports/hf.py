"""A plain Hugging Face folder: the source's own bytes, or 16-bit floats for what was quantized.

FP8 in blocks goes back to DeepSeek-V3's own form, X.weight with X.weight_scale_inv (arXiv 2412.19437 §3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.engine_config import QUANTIZATION_KEY
from pipeline.checkpoint.layouts.scales import BLOCK, FP8, count_blocks, source_scale
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.exports.names import make_suffixes
from pipeline.exports.plan import Encoding
from pipeline.exports.refusals import refuse_cut_blocks

if TYPE_CHECKING:
    import torch

    from pipeline.exports.linear import Numbers, Part, QuantizedLinear
    from pipeline.exports.plan import Plan

DEEPSEEK: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def _describe(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    weight = f"{part.name}.weight"
    return [TensorInfo(weight, FP8, part.shape), TensorInfo(source_scale(weight), "F32", count_blocks(part.shape))]


def _encode(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    return [numbers.q, numbers.scales]


ENCODINGS: Mapping[str, Encoding] = {
    "fp8_blocks": Encoding(describe=_describe, encode=_encode, refuse=refuse_cut_blocks)
}


def describe(plan: Plan) -> dict[str, Any] | None:
    """quantization_config: the source's own for its own FP8, with what is in 16 bits for ours."""
    if not plan.kept:
        return None
    stated = plan.engine.config.get(QUANTIZATION_KEY)
    if stated is not None and not plan.is_quantized:
        return dict(stated)
    left = make_suffixes(plan.wide_linears, [*plan.kept, *plan.wide_linears])
    return {**(stated or DEEPSEEK), "modules_to_not_convert": left}
