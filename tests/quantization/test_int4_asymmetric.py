"""INT4 with zero points against torch's own affine quantization."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import int4
from pipeline.quantization.int4_grids import asymmetric


def skewed(rows: int = 24, columns: int = 128) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) * 2 - 0.4


def rounded(weight: torch.Tensor, group: int = 64) -> torch.Tensor:
    return int4.dequantize(*int4.quantize_with_zeros(weight, group))


@pytest.mark.parametrize("clipped", [False, True])
def test_as_torch_quantizes(clipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits on both sides are weights clipped before, as AWQ's authors do it; tiles or the whole."""
    monkeypatch.setattr(int4, "TILE_ELEMENTS", 128 * 6)
    weight = skewed()
    limits = torch.full((24, 2), 0.7) if clipped else None
    packed, scales, zeros = int4.quantize_with_zeros(weight, 64, limits=limits)
    assert zeros.dtype == torch.int8 and zeros.min() >= -8 and zeros.max() <= 7
    clamped = weight.clamp(-0.7, 0.7) if clipped else weight
    expected = torch.fake_quantize_per_channel_affine(
        clamped.view(-1, 64), scales.view(-1), zeros.view(-1).int() + 8, 0, 0, 15
    ).view(weight.shape)
    torch.testing.assert_close(int4.dequantize(packed, scales, zeros), expected)
    torch.testing.assert_close(int4.round_trip(weight, 64, limits=limits, grid=asymmetric), expected)
    q = int4.unpack(packed)
    assert q.max() == 7 and q.min() == -8


def test_halves_the_error_of_skewed_weights() -> None:
    weight = skewed()
    symmetric = int4.dequantize(*int4.quantize_packed(weight, 64))
    assert (rounded(weight) - weight).square().mean() < 0.5 * (symmetric - weight).square().mean()


def test_no_error_exceeds_half_a_step() -> None:
    weight = skewed()
    packed, scales, zeros = int4.quantize_with_zeros(weight, 32, scale_dtype=torch.float16)
    assert torch.equal(scales, scales.half().float())
    steps = ((int4.dequantize(packed, scales, zeros) - weight).view(24, -1, 32) / scales[:, :, None]).abs()
    assert steps.max() <= 1.01  # half from rounding the weight, half from rounding the zero point


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
def test_constant_groups(value: float) -> None:
    weight = torch.full((2, 64), value)
    torch.testing.assert_close(rounded(weight), weight)


def test_zero_stays_zero() -> None:
    weight = skewed()
    weight[:, ::7] = 0
    assert torch.equal(rounded(weight)[:, ::7], weight[:, ::7])


def test_what_is_refused() -> None:
    with pytest.raises(QuantizationError, match="does not divide its 128"):
        int4.quantize_with_zeros(skewed(), 48)
    weight = skewed()
    weight[3, 3] = torch.nan
    with pytest.raises(QuantizationError, match="x has NaN"):
        int4.quantize_with_zeros(weight, 64, name="x")
