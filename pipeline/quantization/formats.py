"""The formats a linear can be stored in: which tensors, and how they are made of its weight. One row per format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.layouts.scales import (
    ACTIVATION_SCALES,
    BLOCK_SCALES,
    CHANNEL_SCALES,
    FP8,
    INT8,
    WEIGHT_SCALES,
    WEIGHT_SCALES_2,
    ZEROS,
    count_blocks,
)
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.errors import QuantizationError
from pipeline.quantization import fp8, int4, int8, w4a8
from pipeline.quantization.int4_grids import ASYMMETRIC_SCALES

if TYPE_CHECKING:
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


def _describe_int4_zeros(linear: Linear) -> list[TensorInfo]:
    weight, scales = _describe_int4(linear)
    return [weight, scales, TensorInfo(f"{linear.name}.{ZEROS}", "I8", scales.shape)]


def _pack_int4_zeros(
    linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype
) -> list[RawTensor]:
    tensors = int4.quantize_with_zeros(
        weight,
        linear.group_size,
        scale_dtype=ASYMMETRIC_SCALES,
        limits=treatment.limits,
        name=f"{linear.name}.weight",
    )
    return [RawTensor.from_torch(tensor) for tensor in tensors]


def _describe_int4_fp8(linear: Linear) -> list[TensorInfo]:
    one = [TensorInfo(f"{linear.name}.{kind}", "F32", (1,)) for kind in (WEIGHT_SCALES_2, ACTIVATION_SCALES)]
    return [*_describe_int4(linear), *one]


def _pack_int4_fp8(
    linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype
) -> list[RawTensor]:
    packed, scales = _pack_int4(linear, weight, treatment, scale_dtype)
    second = w4a8.second_scale(scales.to_torch(), name=linear.name)
    return [
        packed,
        scales,
        RawTensor.from_torch(second),
        RawTensor.from_torch(_step(linear, treatment, w4a8.input_step)),
    ]


def _describe_fp8(linear: Linear) -> list[TensorInfo]:
    return [
        TensorInfo(f"{linear.name}.weight", FP8, linear.shape),
        TensorInfo(f"{linear.name}.{WEIGHT_SCALES}", "F32", (1,)),
        TensorInfo(f"{linear.name}.{ACTIVATION_SCALES}", "F32", (1,)),
    ]


def _pack_fp8(linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype) -> list[RawTensor]:
    if treatment.round is not None:
        q, scale = treatment.round(weight[:].float())
    else:
        q, scale = fp8.quantize(weight, name=f"{linear.name}.weight")
    return [RawTensor.from_torch(t) for t in (q, scale, _step(linear, treatment, fp8.input_step))]


def _describe_fp8_blocks(linear: Linear) -> list[TensorInfo]:
    return [
        TensorInfo(f"{linear.name}.weight", FP8, linear.shape),
        TensorInfo(f"{linear.name}.{BLOCK_SCALES}", "F32", count_blocks(linear.shape)),
    ]


def _pack_fp8_blocks(
    linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype
) -> list[RawTensor]:
    return [RawTensor.from_torch(t) for t in fp8.quantize_blocks(weight, name=f"{linear.name}.weight")]


def _describe_int8(linear: Linear) -> list[TensorInfo]:
    return [
        TensorInfo(f"{linear.name}.weight", INT8, linear.shape),
        TensorInfo(f"{linear.name}.{CHANNEL_SCALES}", "F32", linear.shape[:1]),
    ]


def _pack_int8(linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype) -> list[RawTensor]:
    return [RawTensor.from_torch(t) for t in int8.quantize(weight, name=f"{linear.name}.weight")]


def _describe_int8_sq(linear: Linear) -> list[TensorInfo]:
    return [
        TensorInfo(f"{linear.name}.weight", INT8, linear.shape),
        TensorInfo(f"{linear.name}.{WEIGHT_SCALES}", "F32", linear.shape[:1]),
        TensorInfo(f"{linear.name}.{ACTIVATION_SCALES}", "F32", (1,)),
    ]


def _pack_int8_sq(linear: Linear, weight: int4.Rows, treatment: Treatment, scale_dtype: torch.dtype) -> list[RawTensor]:
    q, scales = int8.quantize(weight, name=f"{linear.name}.weight")
    return [RawTensor.from_torch(t) for t in (q, scales, _step(linear, treatment, int8.input_step))]


def _step(linear: Linear, treatment: Treatment, step: Callable[[float], float]) -> torch.Tensor:
    """float32 [1]."""
    if treatment.input_amax is None:
        raise QuantizationError(
            f"{linear.name}: no calibration token reached it, so its input has no range",
            hint="add text or samples to stages.quantize.calibration, set unrouted_experts: share_scale, or give it a "
            "method without static inputs",
        )
    return torch.tensor([step(treatment.input_amax)], dtype=torch.float32)


FORMATS: dict[str, Format] = {
    "int4": Format(describe=_describe_int4, pack=_pack_int4),
    "int4_fp8": Format(describe=_describe_int4_fp8, pack=_pack_int4_fp8),
    "fp8": Format(describe=_describe_fp8, pack=_pack_fp8),
    "fp8_blocks": Format(describe=_describe_fp8_blocks, pack=_pack_fp8_blocks),
    "int8": Format(describe=_describe_int8, pack=_pack_int8),
    "int8_sq": Format(describe=_describe_int8_sq, pack=_pack_int8_sq),
    "int4_zeros": Format(describe=_describe_int4_zeros, pack=_pack_int4_zeros),
}
