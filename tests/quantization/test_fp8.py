"""FP8 against torch's own cast and numpy's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.checkpoint.block_scales import dequantize
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import QuantizationError
from pipeline.quantization import fp8
from pipeline.quantization.capture import Inputs
from pipeline.quantization.moments import Moment
from pipeline.quantization.problem import Problem
from pipeline.quantization.rules import Linear


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


@pytest.mark.parametrize("shape", [(1, 7), (128, 64), (300, 96)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_scale_for_all(shape: tuple[int, int], dtype: str) -> None:
    weight = _weight(*shape).to(getattr(torch, dtype))
    q, scale = fp8.quantize(weight)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (1,) and scale.dtype == torch.float32
    assert float(scale) == np.float32(float(weight.float().abs().max())) / np.float32(448)
    assert torch.equal(q.view(torch.uint8), (weight.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    assert float(q.float().abs().max()) == 448  # the largest weight takes the largest number
    # Three bits of mantissa: half a unit in the last place is a sixteenth of the value, of normal numbers.
    error = (q.float() * scale - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 + float(scale) * 2**-10).all()


@pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 1), (256, 384)])
def test_blocks(shape: tuple[int, int]) -> None:
    weight = _weight(*shape)
    q, scales = fp8.quantize_blocks(weight)
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
    assert scales.shape == (rows, columns)
    for r in range(rows):
        for c in range(columns):
            block = weight[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128]
            assert torch.equal(scales[r, c], block.abs().max() / 448)
            expected = (block / scales[r, c]).to(torch.float8_e4m3fn).float()
            assert torch.equal(q[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128].float(), expected)


def test_blocks_are_read_as_deepseeks_own() -> None:
    weight = _weight(200, 300)
    q, scales = fp8.quantize_blocks(weight)
    back = dequantize("x.weight", RawTensor.from_torch(q), RawTensor.from_torch(scales))
    assert (back - weight).abs().max() < weight.abs().max() / 16
    again, same = fp8.quantize_blocks(back)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.allclose(same, scales, rtol=1e-6)


def test_zeros_have_a_scale_that_divides() -> None:
    for quantize in (fp8.quantize, fp8.quantize_blocks):
        q, scale = quantize(torch.zeros(4, 8))
        assert torch.equal(q.float(), torch.zeros(4, 8)) and torch.equal(scale, torch.ones_like(scale))
    assert fp8.input_step(0.0) == 1.0


def test_what_is_beyond_the_range_saturates() -> None:
    assert fp8.encode(torch.tensor([1e4, -1e4, 460.0, 0.0])).float().tolist() == [448.0, -448.0, 448.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named(value: float) -> None:
    weight = torch.ones(140, 8)
    weight[135, 3] = value
    for quantize in (fp8.quantize, fp8.quantize_blocks):
        with pytest.raises(QuantizationError, match=r"layers\.3 has NaN or infinite values"):
            quantize(weight, name="layers.3")


def test_weights_are_rounded_so_that_outputs_are_near() -> None:
    """GPTQ's compensation through the stored tensors, on inputs whose channels go together, as a model's do."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(512, 16, generator=generator) @ torch.randn(16, 96, generator=generator)
    rows += 0.1 * torch.randn(512, 96, generator=generator)
    weight = torch.randn(48, 96, generator=generator)
    linear = Linear(name="x", role="mlp", layer=0, expert=None, shape=(48, 96), method="fp8", group=None)
    inputs = Inputs(rows.abs().mean(0), rows.abs().amax(0), rows, 512)
    h = rows.T @ rows / 512
    problem = Problem(
        name="x",
        linears=(linear,),
        read=lambda _: weight,
        mean_abs=inputs.mean_abs,
        max_abs=inputs.max_abs,
        inputs={"x": inputs},
        realise=lambda s: s,
        scale_dtype=torch.float32,
        clip=False,
        moments={"x": Moment(key="x", make=lambda: h)},
    )
    choice = fp8.choose(problem)
    treatment = choice.treatments["x"]
    assert treatment.input_amax == float(rows.abs().max()) and treatment.round is not None
    q, scale = treatment.round(weight)
    assert q.dtype == torch.float8_e4m3fn and float(scale) == float(weight.abs().max() / 448)
    nearest, _ = fp8.quantize(weight)
    wanted = rows @ weight.T

    def error(stored: torch.Tensor) -> float:
        return float((rows @ (stored.float() * scale).T - wanted).square().sum())

    assert error(q) < 0.5 * error(nearest)
    assert choice.losses["x"].after < choice.losses["x"].before
