"""AutoAWQ's "gemm" layout, which vLLM, LMDeploy, SGLang and transformers load: INT4 with zero points, float16 scales.

For each linear [O, I] with g inputs per group: qweight int32 [I, O/8], qzeros int32 [I/g, O/8], scales F16 [I/g, O];
w = (q - z)·s with q and z in 0 to 15 (words.py has the order of the nibbles). Ours are in [-8, 7], so 8 is added to
both, z being 0 of what is symmetric: the same product, nothing is rounded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.exports.linear import Numbers, Part, QuantizedLinear
from pipeline.exports.names import make_suffixes
from pipeline.exports.plan import Encoding
from pipeline.exports.refusals import refuse_head, refuse_prescaled, refuse_wide_scales
from pipeline.quantization.words import AWQ, PER_WORD, ZERO, pack_words

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.exports.plan import Plan


def _describe(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    rows, columns = part.shape
    groups = columns // (linear.group or columns)
    return [
        TensorInfo(f"{part.name}.qweight", "I32", (columns, rows // PER_WORD)),
        TensorInfo(f"{part.name}.qzeros", "I32", (groups, rows // PER_WORD)),
        TensorInfo(f"{part.name}.scales", "F16", (groups, rows)),
    ]


def _encode(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    import torch

    q, scales, zeros = numbers.q, numbers.scales.T.half(), numbers.zeros
    zeros = torch.zeros(numbers.scales.shape, dtype=torch.int8) if zeros is None else zeros
    return [pack_words((q + ZERO).T.contiguous(), AWQ), pack_words((zeros + ZERO).T, AWQ), scales]


def _refuse_outputs(linear: QuantizedLinear) -> str | None:
    if any(part.shape[0] % PER_WORD for part in linear.parts):
        return f"its outputs are no multiple of {PER_WORD}"
    return None


def _refuse(linear: QuantizedLinear) -> str | None:
    reasons = (refuse(linear) for refuse in (refuse_prescaled, refuse_head, _refuse_outputs, refuse_wide_scales))
    return next(filter(None, reasons), None)


def make_encodings(engine: CheckpointFolder) -> Mapping[str, Encoding]:
    """AutoAWQ has one group size for the whole model: that of the most linears, and others are left out."""
    sizes = Counter(
        weight.shape[-1] // info.shape[-1]
        for name, info in engine.tensors.items()
        if name.endswith(WEIGHT_SCALES) and len(info.shape) == 2 and info.shape[-1]
        if (weight := engine.tensors.get(name.replace(WEIGHT_SCALES, "weight"))) is not None
    )
    size = sizes.most_common(1)[0][0] if sizes else None

    def refuse(linear: QuantizedLinear) -> str | None:
        if linear.group != size:
            return f"it has groups of {linear.group}, most linears of {size}; the format has one size"
        return _refuse(linear)

    return dict.fromkeys(("int4", "int4_zeros"), Encoding(describe=_describe, encode=_encode, refuse=refuse))


def describe(plan: Plan) -> dict[str, Any] | None:
    """quantization_config."""
    if not plan.kept:
        return None
    groups = {kept.group for kept in plan.kept.values()}
    every = [*plan.kept, *plan.wide_linears]
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": groups.pop(),
        "zero_point": True,
        "modules_to_not_convert": make_suffixes(plan.wide_linears, every),
    }
