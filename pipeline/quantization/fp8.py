"""FP8 E4M3 (arXiv 2209.05433): one scale per tensor with static scales of the inputs, or one per 128 x 128 block.

Per tensor, weights are rounded by GPTQ (see there): on SmolLM2-135M, rounded to nearest, FP8 cost 0.101 of what INT4 in
groups of 64 costs, and so 0.077. Scales are amax / 448, E4M3's largest value, and multiply: w ≈ q·s.
Shapes: O output, I input features.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks
from pipeline.errors import QuantizationError
from pipeline.quantization.problem import Choice, Loss, Problem, Treatment

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from torch import Tensor

    from pipeline.quantization.int4 import Rows

LARGEST = 448.0


def quantize(weight: Rows, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(q float8_e4m3fn [O, I], s float32 [1]), s = amax/448. Raises QuantizationError for NaN or infinite weights."""
    peaks = [part.float().abs().max() for _, part in _tiles(weight)]
    scale = scale_of(_finite(torch.stack(peaks).max(), name))
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for start, part in _tiles(weight):
        q[start : start + part.shape[0]] = encode(part.float() / scale)
    return q, scale.reshape(1)


def quantize_blocks(weight: Rows, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(q float8_e4m3fn [O, I], s float32 [ceil(O/128), ceil(I/128)]), as DeepSeek-V3 stores its weights
    (arXiv 2412.19437 §3.3.2). Raises QuantizationError for NaN or infinite weights."""
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(count_blocks((rows, columns)), dtype=torch.float32)
    whole = scales.shape[1] * BLOCK
    for start, part in _tiles(weight):
        padded = torch.nn.functional.pad(part.float(), (0, whole - columns)).view(part.shape[0], -1, BLOCK)
        scale = scale_of(_finite(padded.abs().amax((0, 2)), name))
        scales[start // BLOCK] = scale
        q[start : start + part.shape[0]] = encode(padded / scale[:, None]).view(part.shape[0], whole)[:, :columns]
    return q, scales


def choose(problem: Problem) -> Choice:
    """The inputs' largest magnitudes. Weights are rounded by GPTQ (see there) where calibration reached the linear: to
    nearest, they would cost as much as the rounding of inputs does, which nothing can make up for."""
    treatments: dict[str, Treatment] = {}
    losses: dict[str, Loss] = {}
    for linear in problem.linears:
        inputs = problem.inputs.get(linear.name)
        if inputs is None:
            continue
        amax = float(inputs.max_abs.max())
        compensated = partial(_round_linear, problem, linear.name, amax, losses)
        treatments[linear.name] = Treatment(
            input_amax=amax, round=compensated if linear.name in problem.moments else None
        )
        weight = problem.read(linear.name)
        q, scale = quantize(weight, name=f"{linear.name}.weight")
        loss = _loss(inputs.rows, weight, q.float() * scale, amax)
        losses[linear.name] = Loss(loss, loss)
    return Choice(treatments=treatments, losses=losses)


def _round_linear(
    problem: Problem, name: str, amax: float, losses: MutableMapping[str, Loss], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`Treatment.round`: as `quantize`, in the same scale; notes what it lost."""
    from pipeline.quantization.gptq import round_columns

    scale = scale_of(_finite(weight.abs().max(), f"{name}.weight")).reshape(1)
    factor = problem.factors.get(problem.moments[name], None)
    q = round_columns(weight, scale.expand(weight.shape[0], 1), factor, grid=lambda x: encode(x).float())
    losses[name] = Loss(losses[name].before, _loss(problem.inputs[name].rows, weight, q * scale, amax))
    return encode(q), scale


def _loss(rows: Tensor, weight: Tensor, rounded: Tensor, amax: float) -> float:
    """Squared error of the output over the squared output, inputs rounded too. rows [R, I], weights [O, I]."""
    step = input_step(amax)
    output = rows @ weight.T
    error = (encode(rows / step).float() * step) @ rounded.T - output
    return float(error.square().sum(dtype=torch.float64) / output.square().sum(dtype=torch.float64).clamp(min=1e-30))


def encode(x: Tensor) -> Tensor:
    """Rounded to E4M3, halves to even; what is beyond its range saturates (a cast alone gives NaN)."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def scale_of(amax: Tensor) -> Tensor:
    """amax/448, and 1 where that is zero."""
    scale = amax.float() / LARGEST
    return scale.masked_fill(scale == 0, 1.0)


def input_step(amax: float) -> float:
    """The same of an input."""
    return float(scale_of(torch.tensor(amax)))


def _finite(amax: Tensor, name: str) -> Tensor:
    if not torch.isfinite(amax).all():
        raise QuantizationError(
            f"{name} has NaN or infinite values",
            hint="the checkpoint is damaged, or overflowed when it was converted to float16",
        )
    return amax


def _tiles(weight: Rows) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of each strip of blocks, made when asked for."""
    return ((start, weight[start : start + BLOCK]) for start in range(0, weight.shape[0], BLOCK))
