"""AutoAWQ's "gemm" layout, which vLLM, LMDeploy, SGLang and transformers load: INT4 with zero points, float16 scales.

For each linear [O, I] with g inputs per group: qweight int32 [I, O/8], qzeros int32 [I/g, O/8], scales F16 [I/g, O];
w = (q - z)·s with q and z in 0 to 15 (words.py has the order of the nibbles). A symmetric number n in [-8, 7] is n + 8
with z = 8: the same product, nothing is rounded again.

Zero points proper need the 16-bit weights: `find_rounded` rounds those of an unquantized checkpoint to nearest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES, find_format
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.errors import CompatibilityError
from pipeline.exports.linear import Numbers, Part, QuantizedLinear
from pipeline.exports.names import make_suffixes
from pipeline.exports.plan import Encoding
from pipeline.exports.refusals import refuse_head, refuse_prescaled, refuse_wide_scales
from pipeline.quantization.selection import QUANTIZABLE, pick_group
from pipeline.quantization.words import AWQ, PER_WORD, ZERO, pack_words

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.layouts import Mapping as TensorMapping
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

    q, zeros = numbers.q, numbers.zeros
    if zeros is None:
        q, zeros = q + ZERO, torch.full(numbers.scales.shape, ZERO, dtype=torch.uint8)
    scales = numbers.scales.T.half()
    return [pack_words(q.T.contiguous(), AWQ), pack_words(zeros.T, AWQ), scales]


def _refuse_outputs(linear: QuantizedLinear) -> str | None:
    if any(part.shape[0] % PER_WORD for part in linear.parts):
        return f"its outputs are no multiple of {PER_WORD}"
    return None


def _refuse(linear: QuantizedLinear) -> str | None:
    reasons = (refuse(linear) for refuse in (refuse_prescaled, refuse_head, _refuse_outputs, refuse_wide_scales))
    return next(filter(None, reasons), None)


ROUNDED = "int4_zeros"  # the format of what `find_rounded` finds: none of an engine checkpoint's


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

    return {
        "int4": Encoding(describe=_describe, encode=_encode, refuse=refuse),
        ROUNDED: Encoding(describe=_describe, encode=_encode, refuse=_refuse_outputs),
    }


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


@dataclass(frozen=True, kw_only=True)
class RoundedLinear(QuantizedLinear):
    """A 16-bit weight that becomes INT4 with zero points as it is read."""

    size: int

    @property
    def tensors(self) -> list[str]:
        return [self.mapping.target]

    @property
    def group(self) -> int:
        return self.size

    def read(self) -> Numbers:
        import torch

        from pipeline.quantization.int4_asymmetric import quantize_asymmetric

        weight = self.source.read(self.mapping.target).to_torch()
        rounded = quantize_asymmetric(weight, self.size, scale_dtype=torch.float16, name=self.mapping.target)
        return Numbers(format=self.format, q=rounded.q, scales=rounded.scales, zeros=rounded.zeros)


def find_rounded(size: int) -> Callable[[CheckpointFolder, TensorMapping], QuantizedLinear | None]:
    """For `plan_export`: every linear of the decoder that may be quantized, where groups of `size` divide it.

    Raises CompatibilityError for weights that are quantized already: a second rounding would not be what was proved.
    """

    def find(engine: CheckpointFolder, mapping: TensorMapping) -> QuantizedLinear | None:
        if not mapping.target.endswith(".weight"):
            return None
        if (stored := find_format(engine.tensors, mapping.target.removesuffix(".weight"))) is not None:
            raise CompatibilityError(
                f"{mapping.target} is {stored} already; zero points are found on 16-bit weights",
                hint="name the folder that the convert stage wrote, or leave out --asymmetric: symmetric INT4 is "
                "exported exactly",
            )
        if mapping.role not in QUANTIZABLE or mapping.layer is None:
            return None
        if pick_group(mapping.target_shape, size) != size:
            return None
        return RoundedLinear(source=engine, mapping=mapping, format=ROUNDED, size=size)

    return find
