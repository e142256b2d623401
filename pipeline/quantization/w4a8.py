"""INT4 weights by AWQ whose inputs are rounded to FP8, as TensorRT-LLM's W4A8_AWQ kernels multiply them.

Loading such weights, TensorRT-LLM divides the group scales by weights_scaling_factor_2 in float16, and the scale of the
input by the input's step in the model's type. Both divisors are powers of two here, so that neither rounds, and its
engine computes what was measured and proved. Shapes: O output, I input features, g input features per group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import awq, fp8
from pipeline.quantization.problem import PLAIN, Choice, Problem

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SCALE = fp8.LARGEST / 7  # of group scales divided, so that no weight leaves E4M3


def choose(problem: Problem) -> Choice:
    """AWQ's choice, and the inputs' largest magnitudes under its scale."""
    choice = awq.choose(problem)
    treatments = dict(choice.treatments)
    for name, inputs in problem.inputs.items():
        peaks = inputs.max_abs if choice.scale is None else inputs.max_abs / choice.scale
        treatments[name] = replace(treatments.get(name, PLAIN), input_amax=float(peaks.max()))
    return replace(choice, treatments=treatments)


def input_step(amax: float) -> float:
    """The smallest power of two of which the largest input is at most 448, E4M3's largest."""
    return _power_above(fp8.input_step(amax))


def second_scale(scales: Tensor, *, name: str = "weight") -> Tensor:
    """float32 [1] for group scales [O, I/g]. Raises QuantizationError where float16 cannot hold them, divided by it."""
    second = torch.tensor([_power_above(float(scales.max()) / LARGEST_SCALE)])
    if not torch.equal((scales / second).half().float() * second, scales):
        raise QuantizationError(
            f"{name}: its group scales reach from {float(scales.min()):.3g} to {float(scales.max()):.3g}, too far for "
            "float16",
            hint="give it method awq or fp8 (stages.quantize.recipe)",
        )
    return second


def _power_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value))
