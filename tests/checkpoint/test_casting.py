"""Casts against numpy's own rounding, and what they count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.checkpoint.casting import CHUNK_ELEMENTS, Caster, Losses
from pipeline.checkpoint.tensors import DTYPES, RawTensor
from pipeline.errors import CheckpointError

FLOATS = ("F16", "BF16", "F32")


def cast(tensor: torch.Tensor, target: str, *, clip: bool = False) -> tuple[torch.Tensor, Losses]:
    losses = Losses()
    pieces = [p.copy() for p in Caster(target, clip=clip).run("w", RawTensor.from_torch(tensor), losses)]
    data = np.concatenate(pieces).view(np.uint8)
    return RawTensor(target, tuple(tensor.shape), data).to_torch(), losses


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return values[torch.isfinite(values)]


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Nearest, ties to even, on the bits of binary32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_casts_as_numpy_rounds(source: torch.dtype) -> None:
    values = every_finite(source)
    wide = values.to(torch.float32).numpy()
    with np.errstate(over="ignore"):
        halves = wide.astype(np.float16)
    assert np.array_equal(cast(values, "F16")[0].numpy().view(np.uint16), halves.view(np.uint16))
    assert np.array_equal(cast(values, "F32")[0].numpy().view(np.uint32), wide.view(np.uint32))
    assert np.array_equal(cast(values, "BF16")[0].view(torch.uint16).numpy(), round_to_bfloat16(wide))


def test_counts_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(CHUNK_ELEMENTS + 777, generator=generator) * torch.logspace(-12, 6, CHUNK_ELEMENTS + 777)
    values[5] = 0.0
    values[6] = -0.0
    with np.errstate(over="ignore"):
        expected = values.numpy().astype(np.float16)
    out, losses = cast(values, "F16")
    assert np.array_equal(out.numpy().view(np.uint16), expected.view(np.uint16))
    assert losses.overflow == np.isinf(expected).sum() > 0
    assert losses.underflow == ((expected == 0) & (values.numpy() != 0)).sum() > 0
    assert losses.largest == np.abs(values.numpy()).max()


def test_clip_saturates_at_the_largest_value() -> None:
    out, losses = cast(torch.tensor([1e5, -1e6, 3.0, 65504.0]), "F16", clip=True)
    assert out.tolist() == [65504.0, -65504.0, 3.0, 65504.0]
    assert (losses.overflow, losses.largest) == (2, 1e6)


def test_what_rounds_down_to_the_limit_is_no_overflow() -> None:
    out, losses = cast(torch.tensor([65519.0, -65519.0]), "F16")
    assert out.tolist() == [65504.0, -65504.0]
    assert (losses.overflow, losses.largest) == (0, 0.0)
    assert cast(torch.tensor([65520.0]), "F16")[1].overflow == 1


def test_float32_overflows_bfloat16_only_at_the_very_top() -> None:
    assert cast(torch.tensor([3.3895314e38]), "BF16")[1].overflow == 0
    assert cast(torch.tensor([3.4028235e38]), "BF16")[1].overflow == 1
    assert cast(torch.tensor([1e-45]), "BF16")[1].underflow == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_type_passes_through_without_a_copy(dtype: str) -> None:
    raw = RawTensor.from_torch(torch.randn(100).to(getattr(torch, DTYPES[dtype][1])))
    (piece,) = Caster(dtype, clip=False).run("w", raw, Losses())
    assert np.shares_memory(piece, raw.data)
    assert np.array_equal(piece.view(np.uint8), raw.data)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (float("-inf"), "infinite")]
)
def test_non_finite_values_are_refused_with_their_index(dtype: str, target: str, value: float, what: str) -> None:
    tensor = torch.zeros(3, CHUNK_ELEMENTS // 2 + 11, dtype=getattr(torch, DTYPES[dtype][1]))
    tensor[2, 77] = value
    tensor[2, 78] = float("nan")
    with pytest.raises(CheckpointError, match=rf"^w is {what} at \[2, 77\]"):
        cast(tensor, target)


def test_negative_nan_is_found() -> None:
    bits = torch.tensor([0, -1], dtype=torch.int16)  # 0xFFFF
    with pytest.raises(CheckpointError, match=r"NaN at \[1\]"):
        cast(bits.view(torch.bfloat16), "BF16")


def test_other_types_are_refused() -> None:
    with pytest.raises(CheckpointError, match="w is I8"):
        cast(torch.zeros(4, dtype=torch.int8), "F16")
