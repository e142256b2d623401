"""INT8 per output channel against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import int8


@pytest.mark.parametrize("shape", [(1, 3), (64, 128), (700, 513)])  # the last one is more than one tile
def test_each_channel_by_its_own_maximum(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * (1 + 50 * torch.rand(shape[0], 1, generator=generator))
    q, scales = int8.quantize(weight.half())
    values = weight.half().numpy().astype(np.float32)
    expected = np.abs(values).max(1) / np.float32(127)
    np.testing.assert_array_equal(scales.numpy(), expected)
    rounded = np.rint(values / expected[:, None])  # halves to even, as numpy has it
    np.testing.assert_array_equal(q.numpy(), rounded)
    assert set(np.abs(q.numpy()).max(1)) == {127}
    assert (np.abs(q.numpy() * expected[:, None] - values) <= expected[:, None] * 0.5001).all()


def test_a_channel_of_zeros() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    q, scales = int8.quantize(weight)
    assert q.tolist() == [[0, 0], [64, -127]] and scales[0] == 1.0


def test_damaged_weights_are_named() -> None:
    weight = torch.ones(4, 8)
    weight[2, 1] = float("inf")
    with pytest.raises(QuantizationError, match=r"layers\.3 has NaN or infinite values in rows 0 to 3"):
        int8.quantize(weight, name="layers.3")


def test_inputs() -> None:
    step = int8.input_step(2.54)
    assert step == pytest.approx(0.02)
    assert int8.encode(torch.tensor([0.03, 0.05, -9.0, 9.0]) / step).tolist() == [2, 2, -127, 127]
    assert int8.input_step(0.0) == 1.0
