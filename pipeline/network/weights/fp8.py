"""FP8 E4M3 with one scale per weight, or per output, and one per input: the GEMM multiplies FP8 numbers (SM89 on)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.checkpoint.layouts.scales import ACTIVATION_SCALES, CHANNEL_SCALES, FP8, WEIGHT_SCALES
from pipeline.errors import CompatibilityError
from pipeline.network.graph import Graph
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.source import Weights
from pipeline.network.weights.steps import lower_input_step, lower_stack_scales, read_scales


def lower(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in], its input rounded to FP8.

    A stack keeps its GEMM in FP8 only under one scale: dequantized by the largest of its experts', each expert's
    product multiplied by what its own is of that.
    """
    step = lower_input_step(at, weights, bases)
    shape, names = (out_features, in_features), [f"{base}.weight" for base in bases]
    if not stacked:
        weight = at.constant("weight", weights.read(names[0], shape, dtypes=(FP8,)))
        scale = at.constant(WEIGHT_SCALES, read_scales(weights, bases[0], WEIGHT_SCALES, (1,)))
        factors = None
    else:
        weight = at.constant("weight", weights.read_stack(names, shape, dtypes=(FP8,)))
        scale, factors = lower_stack_scales(at, weights, bases, WEIGHT_SCALES, 1)
    return Operand(
        weight=at.dequantize_as_model("dequantize", weight, scale),
        transposed=True,
        step=step,
        quantized="fp8",
        factors=factors,
    )


def lower_rows(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in] with a scale for each output: others' checkpoints, whose q, k and v have scales of their own. The
    input is rounded too, or stays as it is where it has no scale. A stack is dequantized by one number, as of INT8.
    Raises CompatibilityError for a stack of which only some round their input."""
    shape, names = (out_features, in_features), [f"{base}.weight" for base in bases]
    rounds = {weights.has(f"{base}.{ACTIVATION_SCALES}") for base in bases}
    if len(rounds) > 1:
        raise CompatibilityError(
            f"some experts of {bases[0].rsplit('.', 2)[0]} have an {ACTIVATION_SCALES} and some have not",
            hint="quantize the experts of one layer alike",
        )
    factors = None
    if not stacked:
        weight = at.constant("weight", weights.read(names[0], shape, dtypes=(FP8,)))
        scale = at.constant(CHANNEL_SCALES, read_scales(weights, bases[0], CHANNEL_SCALES, (out_features,)))
    else:
        weight = at.constant("weight", weights.read_stack(names, shape, dtypes=(FP8,)))
        scale, factors = lower_stack_scales(at, weights, bases, CHANNEL_SCALES, out_features)
    return Operand(
        weight=at.dequantize_as_model("dequantize", weight, scale, axis=None if stacked else 0),
        transposed=True,
        step=lower_input_step(at, weights, bases) if rounds.pop() else None,
        quantized="fp8",
        factors=factors,
    )
