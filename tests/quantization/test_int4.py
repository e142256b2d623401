"""INT4 rounding and packing against a scalar loop and the published layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import QuantizationError
from pipeline.quantization import int4


def naive_quantize(weight: torch.Tensor, group: int) -> tuple[list[list[int]], list[list[float]]]:
    """One weight at a time, in Python: the definition that the tiled code must reproduce."""
    q, scales = [], []
    for row in weight.tolist():
        q_row, scale_row = [], []
        for start in range(0, len(row), group):
            values = row[start : start + group]
            scale = torch.tensor(max(map(abs, values))).div(7).to(weight.dtype).item() or 1.0
            scale_row.append(scale)
            for value in values:
                exact = torch.tensor(value).div(torch.tensor(scale)).item()
                q_row.append(min(7, max(-8, round(exact))))
        q.append(q_row)
        scales.append(scale_row)
    return q, scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_quantize_equals_naive_loop(dtype: torch.dtype, group: int) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(group)).to(dtype)
    weight[1, :group] = 0
    weight[2, 0] = 30.0  # an outlier: the rest of its group rounds to few levels
    weight[3] = -weight[3].abs()
    q, scales = int4.quantize(weight, group)
    expected_q, expected_scales = naive_quantize(weight, group)
    assert q.tolist() == expected_q
    assert scales.tolist() == expected_scales
    assert scales[1, 0] == 1.0 and not q[1, :group].any()
    assert torch.equal(scales.to(dtype).float(), scales)  # nothing is lost when an engine holds them in its own type


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    whole = int4.quantize_packed(weight, 32)
    monkeypatch.setattr(int4, "TILE_ELEMENTS", 128 * 6)  # 50 rows in tiles of 6: the last one is short
    tiled = int4.quantize_packed(weight, 32)
    q, scales = int4.quantize(weight, 32)
    assert torch.equal(whole[0], tiled[0]) and torch.equal(whole[1], tiled[1])
    assert torch.equal(int4.pack(q), tiled[0]) and torch.equal(scales, tiled[1])
    assert torch.equal(int4.dequantize(*tiled), q * scales.repeat_interleave(32, dim=1))
    assert torch.equal(int4.round_trip(weight, 32), int4.dequantize(*tiled))


def test_published_layout() -> None:
    """tensorrt-llm and modelopt: the low nibble of byte (r, c) is row 2r, the high one row 2r + 1, two's complement."""
    q = torch.tensor([[-8, 7, 0], [1, -1, -5], [2, 3, -2], [-3, 0, 6]], dtype=torch.int8)
    packed = int4.pack(q)
    assert packed.dtype == torch.int8 and packed.shape == (2, 3)
    as_bytes = packed.view(torch.uint8).tolist()
    assert as_bytes == [[0x18, 0xF7, 0xB0], [0xD2, 0x03, 0x6E]]
    assert torch.equal(int4.unpack(packed), q)


def test_every_pair_of_nibbles_survives() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8)
    q = torch.stack([values.repeat(16), values.repeat_interleave(16)])
    assert torch.equal(int4.unpack(int4.pack(q)), q)
    assert int4.pack(q).unique().numel() == 256


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128]), st.floats(1e-4, 1e3))
@settings(max_examples=40, deadline=None)
def test_error_is_at_most_half_a_step(seed: int, group: int, size: float) -> None:
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)) * size
    packed, scales = int4.quantize_packed(weight, group)
    error = (int4.dequantize(packed, scales) - weight).abs().view(4, -1, group)
    assert (error <= scales[:, :, None] * 0.500001).all()


def test_clipping_limits_bound_the_scale() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    amax = weight.abs().view(4, 2, 32).amax(2)
    q, scales = int4.quantize(weight, 32, limits=amax * 0.5)
    assert torch.allclose(scales, amax * 0.5 / 7)
    assert q.max() == 7 and q.min() == -8  # the clipped ones sit at the ends of the range
    assert torch.equal(int4.quantize(weight, 32, limits=amax * 2)[1], int4.quantize(weight, 32)[1])


def test_float16_scale_that_would_vanish() -> None:
    weight = torch.full((2, 32), 6e-8, dtype=torch.float16)  # amax/7 rounds to zero in float16
    packed, scales = int4.quantize_packed(weight, 32)
    assert (scales == 1.0).all() and not packed.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_refused_by_name(bad: float) -> None:
    weight = torch.zeros(4, 64)
    weight[3, 40] = bad
    with pytest.raises(QuantizationError, match=r"layers\.0\.x has NaN or infinite"):
        int4.quantize_packed(weight, 32, name="layers.0.x")


def test_shapes_that_cannot_be_packed() -> None:
    with pytest.raises(QuantizationError, match="3 output features"):
        int4.quantize_packed(torch.zeros(3, 32), 32)
    with pytest.raises(QuantizationError, match="does not divide its 48"):
        int4.quantize(torch.zeros(2, 48), 32)
    with pytest.raises(QuantizationError, match="do not belong together"):
        int4.dequantize(torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 1))
