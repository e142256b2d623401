"""The formats a linear can be stored in: which tensors, and how they are made of its weight. One row per format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.quantization import int4

if TYPE_CHECKING:
    import torch

    from pipeline.quantization.problem import Treatment
    from pipeline.quantization.rules import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`describe(linear)` declares the tensors of a linear, `pack(linear, weight [O, I], treatment, scale_dtype)` makes
    them, in the same order."""

    describe: Callable[[Linear], list[TensorInfo]]
    pack: Callable[[Linear, int4.Rows, Treatment, torch.dtype], list[RawTensor]]


def _describe_int4(linear: Linear) -> list[TensorInfo]:
    rows, columns = linear.shape
    return [
        TensorInfo(f"{linear.name}.weight", "I8", (rows // 2, columns)),
        TensorInfo(f"{linear.name}.{WEIGHT_SCALES}", "F32", (rows, columns // linear.group_size)),
    ]


def _pack_int4(linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype) -> list[RawTensor]:
    if treatment.round is not None:
        q, scales = treatment.round(weight[:].float())
        packed = int4.pack(q)
    else:
        packed, scales = int4.quantize_packed(
            weight,
            linear.group_size,
            scale_dtype=scale_dtype,
            limits=treatment.limits,
            name=f"{linear.name}.weight",
        )
    return [RawTensor.from_torch(packed), RawTensor.from_torch(scales)]


FORMATS: dict[str, Format] = {"int4": Format(describe=_describe_int4, pack=_pack_int4)}
