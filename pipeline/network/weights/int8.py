"""INT8 with a scale per output channel: weights alone, or with inputs in INT8 too (SmoothQuant, arXiv 2211.10438)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.checkpoint.layouts.scales import CHANNEL_SCALES, INT8, WEIGHT_SCALES
from pipeline.network.graph import Graph
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.prescale import lower_prescale
from pipeline.network.weights.source import Weights
from pipeline.network.weights.steps import lower_input_step, lower_stack_scales, read_scales


def lower_weight_only(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in], which TensorRT dequantizes inside the GEMM."""
    return _lower(at, weights, bases, (out_features, in_features), CHANNEL_SCALES, stacked)


def lower_smoothed(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in], its input smoothed where that was not folded, and rounded to INT8: the GEMM multiplies integers."""
    operand = _lower(at, weights, bases, (out_features, in_features), WEIGHT_SCALES, stacked)
    return Operand(
        weight=operand.weight,
        transposed=True,
        prescale=lower_prescale(at, weights, bases, in_features, stacked),
        step=lower_input_step(at, weights, bases),
        quantized="int8",
        factors=operand.factors,
    )


def _lower(
    at: Graph, weights: Weights, bases: Sequence[str], shape: tuple[int, int], scales: str, stacked: bool
) -> Operand:
    """TensorRT knows no scale per channel of a stack: that is dequantized by one number, and each channel's product
    multiplied by what its scale is of that."""
    names = [f"{base}.weight" for base in bases]
    if not stacked:
        weight = at.constant("weight", weights.read(names[0], shape, dtypes=(INT8,)))
        scale = at.constant(scales, read_scales(weights, bases[0], scales, (shape[0],)))
        return Operand(weight=at.dequantize_as_model("dequantize", weight, scale, axis=0), transposed=True)
    weight = at.constant("weight", weights.read_stack(names, shape, dtypes=(INT8,)))
    scale, factors = lower_stack_scales(at, weights, bases, scales, shape[0])
    return Operand(weight=at.dequantize_as_model("dequantize", weight, scale), transposed=True, factors=factors)
