"""Asymmetric groups against torch's own affine quantization."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import int4
from pipeline.quantization.int4_asymmetric import quantize_asymmetric


def skewed(rows: int = 24, columns: int = 128) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) * 2 - 0.4


def test_as_torch_quantizes() -> None:
    weight = skewed()
    found = quantize_asymmetric(weight, 64)
    expected = torch.fake_quantize_per_channel_affine(
        weight.view(-1, 64), found.scales.view(-1), found.zeros.view(-1).int(), 0, 0, 15
    )
    torch.testing.assert_close(found.dequantize(), expected.view(weight.shape))
    assert found.q.max() == 15 and found.q.min() == 0


def test_halves_the_error_of_skewed_weights() -> None:
    weight = skewed()
    symmetric = int4.dequantize(*int4.quantize_packed(weight, 64))
    asymmetric = quantize_asymmetric(weight, 64).dequantize()
    assert (asymmetric - weight).square().mean() < 0.5 * (symmetric - weight).square().mean()


def test_no_error_exceeds_half_a_step() -> None:
    weight = skewed()
    found = quantize_asymmetric(weight, 32, scale_dtype=torch.float16)
    assert torch.equal(found.scales, found.scales.half().float())
    steps = ((found.dequantize() - weight).view(24, -1, 32) / found.scales[:, :, None]).abs()
    assert steps.max() <= 1.01  # half from rounding the weight, half from rounding the zero point


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
def test_constant_groups(value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(quantize_asymmetric(weight, 64).dequantize(), weight)


def test_zero_stays_zero() -> None:
    weight = skewed()
    weight[:, ::7] = 0
    assert torch.equal(quantize_asymmetric(weight, 64).dequantize()[:, ::7], weight[:, ::7])


def test_what_is_refused() -> None:
    with pytest.raises(QuantizationError, match="does not divide its 128"):
        quantize_asymmetric(skewed(), 48)
    weight = skewed()
    weight[3, 3] = torch.nan
    with pytest.raises(QuantizationError, match="x has NaN"):
        quantize_asymmetric(weight, 64, name="x")
