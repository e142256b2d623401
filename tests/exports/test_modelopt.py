"""modelopt's folders, decoded by hand from its layout (of 0.47): numbers, vectors, static scales, both configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.exports.formats import export_checkpoint
from tests.exports import support


def decode(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W = q·scale·pre_quant_scale, row 2r of a byte's row r in its low nibble."""
    dense = {}
    for name, tensor in state.items():
        base, _, kind = name.rpartition(".")
        if kind in ("weight_scale", "weight_scale_2", "pre_quant_scale", "input_scale"):
            continue
        dense[name] = tensor
        scale = state.get(f"{base}.weight_scale")
        if scale is None or kind != "weight":
            continue
        if tensor.dtype == torch.uint8:
            low, high = tensor.int() & 15, tensor.int() >> 4
            q = torch.stack([low, high], dim=1).reshape(-1, tensor.shape[1])
            q = torch.where(q > 7, q - 16, q).float()
            dense[name] = q * scale.repeat_interleave(tensor.shape[1] // scale.shape[1], 1)
        else:
            assert scale.shape == () and state[f"{base}.input_scale"].shape == ()
            dense[name] = tensor.float() * scale
        if f"{base}.pre_quant_scale" in state:
            dense[name] = dense[name] * state[f"{base}.pre_quant_scale"].float()
    return dense


@pytest.mark.parametrize(
    ("name", "method", "algo"),
    [("llama", "awq", "W4A16_AWQ"), ("v2", "awq", "W4A16_AWQ"), ("qwen2", "fp8", "FP8"), ("v3", "gptq", "W4A16_AWQ")],
)
def test_the_numbers_are_ours(name: str, method: str, algo: str, tmp_path: Path) -> None:
    engine = support.quantize(name, method, tmp_path, group=32)
    report = export_checkpoint(engine, tmp_path / "out", "modelopt")
    assert not report.widened
    state = support.load_folder(tmp_path / "out")
    assert any(key.endswith("pre_quant_scale") for key in state) == (method == "awq")
    dense = {key: tensor for key, tensor in decode(state).items() if ".layers.2." not in key}
    found = support.logits_of_state(engine, dense, tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine, wide_inputs=True)) < 1e-4
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "modelopt", **own}
    assert own["quant_algo"] == algo
    assert own.get("group_size") == (None if method == "fp8" else 32)
    quantized = {key.rpartition(".")[0] for key in state if key.endswith(".weight_scale")}
    left = {
        key.removesuffix(".weight") for key, t in state.items() if key.endswith(".weight") and t.ndim == 2
    } - quantized
    assert set(own["exclude_modules"]) == {each for each in left if not each.endswith("embed_tokens")}


def test_two_algorithms_are_named_by_linear(tmp_path: Path) -> None:
    engine = support.quantize("llama", "gptq", tmp_path, recipe={"*.mlp.proj": "fp8"})
    export_checkpoint(engine, tmp_path / "out", "modelopt")
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert own["quant_algo"] == "MIXED_PRECISION"
    layers = own["quantized_layers"]
    assert layers["model.layers.0.mlp.down_proj"] == {"quant_algo": "FP8"}
    assert layers["model.layers.1.self_attn.v_proj"]["quant_algo"] == "W4A16_AWQ"
    assert len(layers) == 14


def test_what_it_has_no_place_for(tmp_path: Path) -> None:
    engine = support.quantize("llama", "gptq", tmp_path, recipe={"*.mlp.proj": "int8"})
    with pytest.raises(
        CompatibilityError, match=r"mlp\.down_proj cannot be exported as modelopt: .* no place for int8"
    ):
        export_checkpoint(engine, tmp_path / "out", "modelopt")


def test_four_bit_weights_with_eight_bit_inputs(tmp_path: Path) -> None:
    """weight_scale_2 F32 [] is what modelopt's own export of W4A8_AWQ has: the largest scale's share of E4M3."""
    engine = support.quantize("llama", "awq_fp8", tmp_path, group=64)
    assert not export_checkpoint(engine, tmp_path / "out", "modelopt").widened
    state = support.load_folder(tmp_path / "out")
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert (own["quant_algo"], own["group_size"]) == ("W4A8_AWQ", 64)
    found = support.logits_of_state(engine, decode(state), tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine, wide_inputs=True)) < 1e-4
    for base in (key.removesuffix(".weight_scale") for key in state if key.endswith(".weight_scale")):
        second, step = state[f"{base}.weight_scale_2"], state[f"{base}.input_scale"]
        assert second.shape == step.shape == () and second.dtype == step.dtype == torch.float32
        assert (state[f"{base}.weight_scale"] / second).max() <= 448 and step > 0
        fused = base.replace("model.layers", "transformer.layers").replace("mlp.down_proj", "mlp.proj")
        if fused.endswith("mlp.proj"):
            assert torch.equal(second, engine.read(f"{fused}.weights_scaling_factor_2").to_torch()[0])
            assert torch.equal(step, engine.read(f"{fused}.activation_scaling_factor").to_torch()[0])


def test_the_scales_of_an_fp8_cache_come_along(tmp_path: Path) -> None:
    engine = support.quantize("llama", "fp8", tmp_path, kv_cache="fp8")
    assert not export_checkpoint(engine, tmp_path / "out", "modelopt").left_out
    state = support.load_folder(tmp_path / "out")
    for layer in range(2):
        stored = engine.read(f"transformer.layers.{layer}.attention.kv_cache_scaling_factor").to_torch()
        for kind in ("k_proj.k_scale", "v_proj.v_scale"):
            found = state[f"model.layers.{layer}.self_attn.{kind}"]
            assert (found.dtype, found.shape) == (torch.float32, ()) and found == stored[0]
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert own["kv_cache_quant_algo"] == config["kv_cache_quant_algo"] == "FP8"


def test_an_int8_cache_is_none_of_its(tmp_path: Path) -> None:
    engine = support.quantize("llama", "fp8", tmp_path, kv_cache="int8")
    assert len(export_checkpoint(engine, tmp_path / "out", "modelopt").left_out) == 2
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert own["kv_cache_quant_algo"] is None


def test_a_damaged_scale_of_the_cache_is_refused(tmp_path: Path) -> None:
    engine = support.quantize("llama", "fp8", tmp_path, kv_cache="fp8")
    name = "transformer.layers.1.attention.kv_cache_scaling_factor"
    damaged = support.damage(engine, lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"kv_cache_scaling_factor is F32\[2\], and not F32\[1\]"):
        export_checkpoint(damaged, tmp_path / "out", "modelopt")
    assert not (tmp_path / "out").exists()
