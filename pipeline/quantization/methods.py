"""The quantization methods: what each measures, how it chooses, and the format it packs into. One row per method.

A method answers a `Problem` with a `Choice`; streaming, folding, resuming and reporting are not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import INT4_SCALES
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.errors import CompatibilityError
from pipeline.quantization import awq, int4, rtn
from pipeline.quantization.problem import Choice, Problem
from pipeline.quantization.selection import METHODS as MEASURES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.quantization.rules import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a quantized linear is stored: `describe` declares its tensors, `pack` makes them, in the same order.

    `pack(linear, weight [O, I], limits [O, I/g] or None, scale_dtype)`.
    """

    quant_algo: str
    describe: Callable[[Linear], list[TensorInfo]]
    pack: Callable[[Linear, int4.Rows, Tensor | None, torch.dtype], list[RawTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`measures`: whether `choose` looks at activations, as the table of methods in `selection` says."""

    measures: bool
    choose: Callable[[Problem], Choice]
    format: Format


def _describe_int4(linear: Linear) -> list[TensorInfo]:
    rows, columns = linear.shape
    return [
        TensorInfo(f"{linear.name}.weight", "I8", (rows // 2, columns)),
        TensorInfo(f"{linear.name}.{INT4_SCALES}", "F32", (rows, columns // linear.group)),
    ]


def _pack_int4(linear: Linear, weight: int4.Rows, limits: Tensor | None, scale_dtype: torch.dtype) -> list[RawTensor]:
    packed, scales = int4.quantize_packed(
        weight, linear.group, scale_dtype=scale_dtype, limits=limits, name=f"{linear.name}.weight"
    )
    return [RawTensor.from_torch(packed), RawTensor.from_torch(scales)]


W4A16_AWQ = Format(quant_algo="W4A16_AWQ", describe=_describe_int4, pack=_pack_int4)

METHODS: dict[str, Method] = {
    "rtn": Method(measures=MEASURES["rtn"], choose=rtn.choose, format=W4A16_AWQ),
    "awq": Method(measures=MEASURES["awq"], choose=awq.choose, format=W4A16_AWQ),
}


def find_method(name: str) -> Method:
    """Raises CompatibilityError for a method that this version does not have."""
    if name not in METHODS:
        raise CompatibilityError(
            f"stages.quantize.method: {name} is not available", hint=f"methods: {', '.join(sorted(METHODS))}"
        )
    return METHODS[name]
