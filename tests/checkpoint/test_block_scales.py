"""FP8 blocks against torch's own decoding and a loop over elements; ragged last blocks, damage, and true shapes."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.checkpoint.block_scales import check_config, dequantize, iterate_kept, iterate_tiles
from pipeline.checkpoint.layouts.scales import count_blocks
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError
from tests import fixtures


def draw(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite byte, in a random order, and scales of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    bytes_[bytes_ & 0x7F == 0x7F] = 0x80
    scales = torch.randn(count_blocks((rows, columns)), generator=generator).exp() * 1e-4
    return bytes_.view(torch.float8_e4m3fn), scales


def run(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize("w", RawTensor.from_torch(weight), RawTensor.from_torch(scales))


def test_every_byte_is_decoded_as_torch_does() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, -1)
    finite = ~weight.float().isnan()
    weight = torch.where(finite, weight.float(), 0.0).to(torch.float8_e4m3fn)
    found = run(weight, torch.ones(1, 2))
    assert torch.equal(found.view(torch.int32), weight.float().view(torch.int32))  # -0.0 too


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (288, 512), (80, 128), (1, 1), (129, 257), (300, 5), (3, 4096)]
)
def test_blocks_by_a_loop_over_elements(shape: tuple[int, int]) -> None:
    weight, scales = draw(*shape)
    values, factors = weight.float().tolist(), scales.tolist()
    expected = torch.tensor(
        [[v * factors[i // 128][j // 128] for j, v in enumerate(row)] for i, row in enumerate(values)],
        dtype=torch.float64,
    ).float()
    assert torch.equal(run(weight, scales), expected)


def test_the_shape_that_transformers_refuses() -> None:
    """kv_a_proj_with_mqa of the real V3: 576 = 4.5 blocks of rows."""
    weight, scales = draw(576, 7168)
    expected = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:576]
    assert torch.equal(run(weight, scales), expected)


def test_tiles_stay_small_and_within_a_block_of_rows() -> None:
    weight, scales = draw(300, 9000)
    sizes = [t.shape[0] for t in iterate_tiles("w", RawTensor.from_torch(weight), RawTensor.from_torch(scales))]
    assert sum(sizes) == 300
    assert max(sizes) * 9000 <= 1 << 18


def test_huge_scales_do_not_overflow_on_the_way() -> None:
    weight = torch.tensor([[2.0**-9, 1.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[3e38]])
    assert run(weight, scales).tolist() == (weight.float() * scales).tolist()


def test_the_fixtures_weights_come_back() -> None:
    """A rounding to E4M3 of a block's largest value / 448 costs at most one part in sixteen of a value."""
    tensors = {"a.weight": torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).bfloat16()}
    before = tensors["a.weight"].float()
    fixtures.quantize_fp8(tensors)
    after = run(tensors["a.weight"], tensors["a.weight_scale_inv"])
    assert ((after - before).abs() <= before.abs() / 16 + 448 * tensors["a.weight_scale_inv"].max() * 2**-16).all()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("nan", r"w is NaN at \[130, 7\]"),
        ("scale nan", r"scale of block \[1, 0\] is not finite"),
        ("scale infinite", "not finite"),
        ("scale shape", r"F32\[2, 2\]; blocks of 128 x 128 have F32\[2, 1\]"),
        ("scale type", r"scales BF16"),
    ],
)
def test_damage_is_named(damage: str, expected: str) -> None:
    weight, scales = draw(200, 100)
    if damage == "nan":
        weight.view(torch.uint8)[130, 7] = 0xFF
    elif damage == "scale nan":
        scales[1, 0] = math.nan
    elif damage == "scale infinite":
        scales[0, 0] = math.inf
    scales = torch.ones(2, 2) if damage == "scale shape" else scales.bfloat16() if damage == "scale type" else scales
    with pytest.raises(CheckpointError, match=expected):
        run(weight, scales)


def test_kept_bytes_are_looked_at_too() -> None:
    weight, _ = draw(3000, 200)
    raw = RawTensor.from_torch(weight)
    assert b"".join(bytes(piece) for piece in iterate_kept("w", raw)) == bytes(raw.data)
    weight.view(torch.uint8)[2999, 199] = 0x7F
    with pytest.raises(CheckpointError, match=r"w is NaN at \[2999, 199\]"):
        list(iterate_kept("w", raw))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"weight_block_size": [64, 128]}, r"\[64, 128\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"fmt": "e5m2"}, "e5m2"),
    ],
)
def test_other_quantization_is_refused(change: dict[str, object], expected: str) -> None:
    check_config({"quantization_config": fixtures.FP8_CONFIG}, "config.json")
    check_config({}, "config.json")
    with pytest.raises(CheckpointError, match=expected):
        check_config({"quantization_config": fixtures.FP8_CONFIG | change}, "config.json")
    with pytest.raises(CheckpointError, match="quantized"):
        check_config({"quantization_config": "fp8"}, "config.json")
