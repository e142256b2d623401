"""modelopt's folders, decoded by hand from its layout (of 0.47): numbers, vectors, static scales, both configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.errors import CompatibilityError
from pipeline.exports.formats import export_checkpoint
from tests.exports import support


def decode(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W = q·scale·pre_quant_scale, row 2r of a byte's row r in its low nibble."""
    dense = {}
    for name, tensor in state.items():
        base, _, kind = name.rpartition(".")
        if kind in ("weight_scale", "pre_quant_scale", "input_scale"):
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
