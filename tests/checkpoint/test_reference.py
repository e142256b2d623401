"""One layer at a time gives the whole transformers model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.reference import build_hf_layer, build_hf_norm, build_hf_rotary, causal_mask
from pipeline.errors import CheckpointError
from tests import fixtures
from tests.whole_model import load_whole

TOKENS = 96  # beyond the 64 positions of the original context of the yarn and llama3 fixtures
CASES: list[tuple[Any, dict[str, Any]]] = [
    *[(fixtures.llama, {"rope": rope}) for rope in fixtures.LLAMA_ROPES],
    (fixtures.llama, {"attention_bias": True, "mlp_bias": True}),
    *[(fixtures.deepseek_moe, {"rope": rope}) for rope in ("default", "linear", "dynamic")],
    (fixtures.deepseek_moe, {"num_hidden_layers": 5, "moe_layer_freq": 2, "attention_bias": True}),
    (fixtures.deepseek_moe, {"num_key_value_heads": 2, "num_experts_per_tok": 1, "n_shared_experts": 1}),
    (fixtures.deepseek_v2, {}),
    (fixtures.qwen2, {}),
    (fixtures.deepseek_v3, {}),
    (fixtures.deepseek_v3, {"rope_interleave": False, "q_lora_rank": None}),
    (fixtures.deepseek_v2, {"q_lora_rank": None, "topk_method": "greedy", "rope": "default"}),
]


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def layer_state(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("write", "options"), CASES)
def test_layers_give_whole_models_logits(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "m", **options)
    ids = torch.arange(TOKENS)[None] * 37 % 512
    with torch.no_grad():
        expected = load_whole(path)(ids).logits
    config, tensors = json.loads((path / "config.json").read_text()), load_all(path)
    hidden = torch.nn.functional.embedding(ids, tensors["model.embed_tokens.weight"].float())
    embeddings = build_hf_rotary(config)(hidden, torch.arange(TOKENS)[None])
    for layer in range(config["num_hidden_layers"]):
        module = build_hf_layer(config, layer, layer_state(tensors, layer), torch.float32)
        hidden = module(hidden, attention_mask=causal_mask(TOKENS, hidden.dtype), position_embeddings=embeddings)
    hidden = build_hf_norm(config, tensors["model.norm.weight"].float())(hidden)
    logits = hidden @ tensors["lm_head.weight"].float().T
    assert (logits - expected).abs().max() < 1e-5


def test_config_is_left_alone(deepseek_v2_path: Path) -> None:
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    before = json.dumps(config)
    build_hf_rotary(config)
    assert json.dumps(config) == before


def test_only_the_router_stays_float32(deepseek_v2_path: Path) -> None:
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    module = build_hf_layer(config, 1, layer_state(load_all(deepseek_v2_path), 1), torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert {name for name, dtype in types.items() if dtype != torch.bfloat16} == {"mlp.gate.weight"}
    assert types["mlp.gate.weight"] == torch.float32


def test_the_correction_bias_stays_float32(tmp_path: Path) -> None:
    path = fixtures.deepseek_v3(tmp_path / "m")
    config, state = json.loads((path / "config.json").read_text()), layer_state(load_all(path), 1)
    module = build_hf_layer(config, 1, state, torch.bfloat16)
    bias = module.get_submodule("mlp.gate").e_score_correction_bias
    assert isinstance(bias, torch.Tensor)
    assert torch.equal(bias, state["mlp.gate.e_score_correction_bias"])
    del state["mlp.gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match="e_score_correction_bias"):
        build_hf_layer(config, 1, state, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("mlp.experts.3.up_proj.weight", "missing"),
        ("mlp.experts.3.down_proj.weight", "shape"),
        ("self_attn.o_proj.weight", "missing"),
        ("self_attn.kv_b_proj.weight", "shape"),
        ("self_attn.surplus.weight", "extra"),
        ("mlp.experts.16.up_proj.weight", "extra"),
    ],
)
def test_wrong_state_is_refused_by_name(name: str, damage: str, deepseek_v2_path: Path) -> None:
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    state = layer_state(load_all(deepseek_v2_path), 1)
    if damage == "missing":
        del state[name]
    else:
        state[name] = torch.zeros(3, 5)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        build_hf_layer(config, 1, state, torch.float32)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 1}, {"num_key_value_heads": None}])
def test_kv_heads_mean_nothing_to_latent_attention(changes: dict[str, Any], deepseek_v2_path: Path) -> None:
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    state = layer_state(load_all(deepseek_v2_path), 0)
    hidden = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0))
    embeddings = build_hf_rotary(config)(hidden, torch.arange(5)[None])
    outputs = [
        build_hf_layer(c, 0, state, torch.float32)(
            hidden, attention_mask=causal_mask(5, torch.float32), position_embeddings=embeddings
        )
        for c in (config, config | changes)
    ]
    assert torch.equal(*outputs)


def test_null_experts_mean_dense_layers(tmp_path: Path) -> None:
    path = fixtures.deepseek_v2(tmp_path / "m", first_k_dense_replace=3)
    config = json.loads((path / "config.json").read_text()) | {"n_routed_experts": None, "first_k_dense_replace": 0}
    build_hf_layer(config, 2, layer_state(load_all(path), 2), torch.float32)
