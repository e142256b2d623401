"""What is checked when a checkpoint's tensors become constants: each refusal names the tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError, CompatibilityError, TrtseekError
from pipeline.network.derived import Derived
from pipeline.network.weights import Weights
from pipeline.network.weights import int4 as int4_weights
from pipeline.network.weights.fp8_blocks import read_blocks
from tests import fixtures
from tests.network import models

EXPERT = "transformer.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    return models.load_int4(
        fixtures.deepseek_v2,
        tmp_path_factory.mktemp("v2"),
        pattern=r"experts\.\d+\..*_proj\.weight|o_proj",
        group=32,
        dtype="float16",
        prescale="each",
        num_hidden_layers=2,
    )


def _refusal(model: models.Model, error: type[TrtseekError], **changes: RawTensor | None) -> str:
    raw = {**model.source.raw, **{name: value for name, value in changes.items() if value is not None}}
    source = models.MemorySource({name: value for name, value in raw.items() if changes.get(name, value) is not None})
    with pytest.raises(error) as caught:
        models.read_program(model.spec(), model.architecture, source)
    assert caught.value.hint
    return caught.value.message


def test_a_missing_tensor(v2: models.Model) -> None:
    message = _refusal(v2, CheckpointError, **{"transformer.layers.0.attention.kv_b_proj.weight": None})
    assert message == "tensor transformer.layers.0.attention.kv_b_proj.weight is missing"


def test_a_tensor_of_another_shape(v2: models.Model) -> None:
    short = RawTensor.from_torch(torch.ones(127, dtype=torch.float16))
    message = _refusal(v2, CheckpointError, **{"transformer.ln_f.weight": short})
    assert message == "tensor transformer.ln_f.weight has shape [127], the architecture says [128]"


def test_a_tensor_of_another_type(v2: models.Model) -> None:
    other = RawTensor.from_torch(torch.ones(128, dtype=torch.bfloat16))
    message = _refusal(v2, CompatibilityError, **{"transformer.ln_f.weight": other})
    assert message == "tensor transformer.ln_f.weight is BF16, a float16 network takes F16"


def test_a_bias_that_config_denies(v2: models.Model) -> None:
    name = "transformer.layers.0.mlp.fc.bias"
    bias = RawTensor.from_torch(torch.ones(256, dtype=torch.float16))
    message = _refusal(v2, CheckpointError, **{name: bias})
    assert message == f"tensor {name} is there, but config.json says that the layer has none"


def test_a_router_may_be_stored_in_float32(v2: models.Model) -> None:
    name = "transformer.layers.1.mlp.router.weight"
    wide = RawTensor.from_torch(v2.source.raw[name].to_torch().float())
    program = models.read_program(v2.spec(), v2.architecture, models.MemorySource({**v2.source.raw, name: wide}))
    assert program.tensors["layers.1.mlp.router.weight"].dtype == "float32"


def test_scales_that_the_type_cannot_hold(v2: models.Model) -> None:
    name = "transformer.layers.0.attention.dense.weights_scaling_factor"
    for damage in (1 + 2.0**-12, 1e6):
        scales = v2.source.raw[name].to_torch().clone()
        scales[5, 1] = damage
        message = _refusal(v2, CheckpointError, **{name: RawTensor.from_torch(scales)})
        assert message == f"tensor {name} holds scales that float16 cannot represent"


def test_scales_of_no_group(v2: models.Model) -> None:
    name = "transformer.layers.0.attention.dense.weights_scaling_factor"
    scales = RawTensor.from_torch(torch.ones(128, 3))
    assert "is no [128, 128/group]" in _refusal(v2, CheckpointError, **{name: scales})


def test_experts_quantized_in_part(v2: models.Model) -> None:
    whole = RawTensor.from_torch(torch.zeros(64, 128, dtype=torch.float16))
    changes = {f"{EXPERT}4.fc.weight": whole, f"{EXPERT}4.fc.weights_scaling_factor": None}
    message = _refusal(v2, CompatibilityError, **changes)
    assert message == f"{EXPERT}0.fc is int4 and {EXPERT}4.fc is not quantized: a layer's experts are one stack"


def test_experts_of_two_group_sizes(v2: models.Model) -> None:
    coarse = RawTensor.from_torch(torch.ones(64, 2))
    message = _refusal(v2, CompatibilityError, **{f"{EXPERT}4.fc.weights_scaling_factor": coarse})
    assert message == "experts of transformer.layers.1.mlp.experts have the group sizes [32, 64]"


def test_experts_prescaled_in_part(v2: models.Model) -> None:
    message = _refusal(v2, CompatibilityError, **{f"{EXPERT}4.fc.prequant_scaling_factor": None})
    assert "some experts of transformer.layers.1.mlp.experts have a prequant_scaling_factor" in message


def test_absorbed_attention_needs_kv_b_in_16_bits(tmp_path: Path) -> None:
    model = models.load_int4(fixtures.deepseek_v2, tmp_path / "hf", pattern=r"kv_b_proj", group=32, dtype="float16")
    message = _refusal(model, CompatibilityError)
    assert message.startswith("transformer.layers.0.attention.kv_b_proj is quantized to int4")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_keep_their_value(dtype: str) -> None:
    """torch's own conversion as the reference for bfloat16, which numpy lacks."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(6, 2, generator=generator).to(getattr(torch, dtype)).float()
    packed = torch.randint(-128, 128, (3, 64), dtype=torch.int8, generator=generator)
    tensors = {"x.weight": packed, "x.weights_scaling_factor": scales}
    source = models.MemorySource({name: RawTensor.from_torch(tensor) for name, tensor in tensors.items()})
    found = int4_weights.Linears(Weights(source=source, dtype=dtype), ("x",), 6, 64, ())
    assert found.scales().make().to_torch().dtype == getattr(torch, dtype)
    assert torch.equal(found.scales().make().to_torch().float(), scales.T)
    np.testing.assert_array_equal(found.packed().make().to_torch().numpy(), packed.T)


BASES = [f"transformer.layers.1.mlp.experts.{expert}.fc" for expert in range(3)]


def _fp8_source(rows: int, columns: int) -> models.MemorySource:
    source = models.MemorySource()
    for index, base in enumerate(BASES):
        weight = torch.full((rows, columns), index + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
        source.raw[f"{base}.weight"] = RawTensor.from_torch(weight)
        scales = torch.full((-(-rows // 128), -(-columns // 128)), float(index))
        source.raw[f"{base}.weights_block_scaling_factor"] = RawTensor.from_torch(scales)
    return source


def test_whole_fp8_blocks_are_not_copied() -> None:
    source = _fp8_source(128, 256)
    found = read_blocks(Weights(source=source, dtype="bfloat16"), BASES[1:2], 128, 256, False)
    assert found.weight is source.raw[f"{BASES[1]}.weight"]
    assert found.scales is source.raw[f"{BASES[1]}.weights_block_scaling_factor"]


def test_ragged_fp8_blocks_are_filled_up_with_zeros() -> None:
    found = read_blocks(Weights(source=_fp8_source(130, 200), dtype="bfloat16"), BASES, 130, 200, True)
    assert isinstance(found.weight, Derived) and isinstance(found.scales, Derived)
    stack = found.weight.make().to_torch().view(torch.uint8)
    assert stack.shape == (3, 256, 256)
    for index, one in enumerate(stack):
        assert (one[:130, :200] == index + 1).all()
        assert one.sum() == (index + 1) * 130 * 200
    assert found.scales.make().to_torch().tolist() == [[[float(i)] * 2] * 2 for i in range(3)]


def test_fp8_that_cannot_be_a_stack_or_lacks_its_scales_is_refused() -> None:
    source = _fp8_source(128, 128)
    weights = Weights(source=source, dtype="bfloat16")
    with pytest.raises(CompatibilityError, match="takes BF16"):
        weights.read(f"{BASES[0]}.weight", (128, 128))
    source.raw[f"{BASES[2]}.weights_block_scaling_factor"] = RawTensor.from_torch(torch.ones(2, 1))
    with pytest.raises(CheckpointError, match=r"experts\.2\.fc\.weights_block_scaling_factor has shape \[2, 1\]"):
        read_blocks(weights, BASES, 128, 128, True)
    del source.raw[f"{BASES[2]}.weights_block_scaling_factor"]
    with pytest.raises(CheckpointError, match=r"experts\.2\.fc\.weights_block_scaling_factor is missing"):
        read_blocks(weights, BASES, 128, 128, True)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 1), (9, 3), (128, 64), (137, 33), (300, 256)])
def test_bytes_are_transposed_whatever_their_number(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    turned = np.zeros(shape[::-1], np.uint8)
    int4_weights.transpose(rows, turned)
    np.testing.assert_array_equal(turned, rows.T)
