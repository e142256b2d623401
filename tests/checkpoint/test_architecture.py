"""What config.json means: hub's and transformers' spellings, every rope kind, and values that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.reference import build_hf_rotary
from pipeline.errors import CheckpointError
from tests import fixtures

LLAMA, V2 = fixtures.LLAMA_CONFIG, fixtures.V2_CONFIG
QWEN2, V3 = fixtures.QWEN2_CONFIG, fixtures.V3_CONFIG
MOE = fixtures.MOE_CONFIG
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
LLAMA3 = {**(fixtures.LLAMA_ROPES["llama3"] or {})}


def llama(**changes: Any) -> Architecture:
    return parse_architecture(LLAMA | changes)


def test_llama() -> None:
    a = llama(rope_scaling=fixtures.LLAMA_ROPES["linear"], rms_norm_eps=1e-5, attention_bias=True)
    assert (a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim, a.num_layers) == (128, 4, 2, 32, 3)
    assert (a.dtype, a.norm_eps, a.attention_bias, a.mlp_bias) == ("bfloat16", 1e-5, True, False)
    assert (a.rope.kind, a.rope.theta, dict(a.rope.scaling)) == ("linear", 100000.0, {"factor": 4.0})
    assert not a.rope.interleaved
    assert a.latent is None and a.experts is None
    assert a.cache_widths == ((2, 32), (2, 32))


def test_deepseek_moe() -> None:
    a = parse_architecture(MOE)
    assert a.latent is None and a.experts is not None and not a.rope.interleaved
    e = a.experts
    assert (e.num_routed, e.num_shared, e.top_k, e.intermediate_size) == (16, 2, 6, 64)
    assert (e.topk_method, e.scoring_func, e.norm_topk_prob, e.routed_scaling_factor) == (
        "greedy",
        "softmax",
        False,
        1.0,
    )
    assert [a.is_routed(layer) for layer in range(3)] == [False, True, True]
    assert a.cache_widths == ((4, 32), (4, 32))
    b = parse_architecture(MOE | {"moe_layer_freq": 2, "num_hidden_layers": 5})
    assert [b.is_routed(layer) for layer in range(5)] == [False, False, True, False, True]


def test_deepseek_v2() -> None:
    a = parse_architecture(V2 | {"rope_scaling": fixtures.V2_ROPES["yarn"]})
    assert a.latent is not None and a.experts is not None
    assert (a.head_dim, a.latent.q_lora_rank, a.latent.kv_lora_rank, a.latent.latent_dim) == (48, 64, 64, 80)
    assert (a.experts.num_routed, a.experts.num_shared, a.experts.top_k) == (16, 2, 4)
    assert (a.experts.topk_method, a.experts.n_group, a.experts.topk_group) == ("group_limited_greedy", 4, 2)
    assert [a.is_routed(layer) for layer in range(3)] == [False, True, True]
    assert a.rope.interleaved
    assert a.rope.scaling["mscale_all_dim"] == 0.707
    assert a.cache_widths == ((1, 80),)
    assert parse_architecture(V2 | {"q_lora_rank": None}).latent.q_lora_rank is None  # type: ignore[union-attr]


def test_deepseek_v3() -> None:
    a = parse_architecture(V3 | {"rope_scaling": fixtures.V2_ROPES["yarn"]})
    assert a.latent is not None and a.experts is not None
    e = a.experts
    assert (e.topk_method, e.scoring_func, e.norm_topk_prob, e.routed_scaling_factor) == (
        "noaux_tc",
        "sigmoid",
        True,
        2.5,
    )
    assert (a.mtp_layers, a.num_layers, a.rope.interleaved) == (1, 3, True)
    assert not parse_architecture(V3 | {"rope_interleave": False}).rope.interleaved
    # What transformers 5 writes: no topk_method and scoring_func, another name for the layers beyond.
    saved = {key: v for key, v in V3.items() if key not in ("topk_method", "scoring_func", "num_nextn_predict_layers")}
    assert parse_architecture(saved).mtp_layers == 0
    b = parse_architecture(saved | {"num_mtp_layers": 2})
    assert (b.mtp_layers, b.experts) == (2, e)


def test_qwen2_has_biases_that_config_does_not_speak_of() -> None:
    a = parse_architecture(QWEN2)
    assert (a.qkv_bias, a.attention_bias, a.mlp_bias) == (True, False, False)
    assert parse_architecture(QWEN2 | {"layer_types": ["full_attention"] * 3}) == a


def test_r1_distill_llama() -> None:
    a = parse_architecture(LLAMA | fixtures.R1_DISTILL_LLAMA)
    assert (a.rope.kind, a.rope.theta, a.norm_eps, a.qkv_bias) == ("llama3", 500000.0, 1e-5, False)


def test_heads_without_grouping_and_explicit_head_dim() -> None:
    assert llama(num_key_value_heads=None).num_kv_heads == 4
    assert llama(head_dim=64).head_dim == 64
    assert llama(head_dim=None).head_dim == 32


def test_dense_deepseek_v2() -> None:
    assert parse_architecture(V2 | {"n_routed_experts": None}).experts is None
    without = {key: value for key, value in V2.items() if key != "n_routed_experts"}
    assert parse_architecture(without | {"first_k_dense_replace": 3}).experts is None
    with pytest.raises(CheckpointError, match="n_routed_experts is missing"):
        parse_architecture(without)


def test_transformers_own_spelling_means_the_same(tmp_path: Path) -> None:
    """What transformers 5 writes for the fixture (rope_parameters, dtype) parses to the same architecture."""
    from transformers import AutoConfig

    for write in (fixtures.llama, fixtures.deepseek_v2):
        path = write(tmp_path / write.__name__)
        hub = parse_architecture(json.loads((path / "config.json").read_text()))
        config = AutoConfig.from_pretrained(path)
        config.architectures = [hub.name]
        config.save_pretrained(tmp_path / "again")
        again = json.loads((tmp_path / "again" / "config.json").read_text())
        assert "rope_parameters" in again and "rope_scaling" not in again and "dtype" in again
        assert parse_architecture(again) == hub


@pytest.mark.parametrize("kind", fixtures.LLAMA_ROPES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_every_rope_kind(kind: str, key: str) -> None:
    scaling = fixtures.LLAMA_ROPES[kind]
    rope = llama(**{"rope_scaling": None, key: scaling}).rope
    assert rope.kind == kind
    assert dict(rope.scaling) == {k: v for k, v in (scaling or {}).items() if k not in ("type", "rope_type")}
    hf = build_hf_rotary(LLAMA | {"rope_scaling": scaling})
    assert hf.rope_type == rope.kind


def test_theta_in_either_place() -> None:
    assert llama(rope_theta=None).rope.theta == 10000.0
    assert llama(rope_theta=None, rope_scaling={**YARN, "rope_theta": 5e5}).rope.theta == 5e5
    assert llama(rope_theta=5e5, rope_scaling={**YARN, "rope_theta": 5e5}).rope.theta == 5e5


def test_outer_original_length_has_priority_as_in_transformers() -> None:
    changes = {"original_max_position_embeddings": 128, "rope_scaling": YARN}
    assert llama(**changes).rope.scaling["original_max_position_embeddings"] == 128
    hf = build_hf_rotary(LLAMA | changes)
    assert hf.config.rope_parameters["original_max_position_embeddings"] == 128


# Changes to a valid config, and what the message must name.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (LLAMA, {"architectures": None}, ["architectures"]),
    (LLAMA, {"architectures": []}, ["architectures"]),
    (LLAMA, {"architectures": ["A", "B"]}, ["architectures"]),
    (LLAMA, {"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM is not supported"]),
    (LLAMA, {"hidden_size": None}, ["hidden_size is missing"]),
    (LLAMA, {"hidden_size": "128"}, ["hidden_size must be an integer", "'128'"]),
    (LLAMA, {"hidden_size": 128.0}, ["hidden_size must be an integer"]),
    (LLAMA, {"hidden_size": True}, ["hidden_size must be an integer"]),
    (LLAMA, {"hidden_size": -128}, ["hidden_size must be an integer"]),
    (LLAMA, {"hidden_size": 10**400}, ["hidden_size must be an integer", "more than 30 digits"]),
    (LLAMA, {"hidden_size": 126}, ["hidden_size 126 is not a multiple of num_attention_heads 4"]),
    (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers must be an integer from 1 to 1000"]),
    (LLAMA, {"num_hidden_layers": 0}, ["num_hidden_layers"]),
    (LLAMA, {"num_key_value_heads": 3}, ["num_key_value_heads 3 does not divide num_attention_heads 4"]),
    (LLAMA, {"head_dim": 31}, ["head_dim is 31", "even"]),
    (LLAMA, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    (LLAMA, {"tie_word_embeddings": "no"}, ["tie_word_embeddings must be true or false"]),
    (LLAMA, {"torch_dtype": "int8"}, ["torch_dtype is 'int8'"]),
    (LLAMA, {"torch_dtype": ["bfloat16"]}, ["torch_dtype"]),
    (LLAMA, {"rms_norm_eps": -1e-6}, ["rms_norm_eps must be a finite number of at least 0"]),
    (LLAMA, {"rms_norm_eps": float("inf")}, ["rms_norm_eps"]),
    (LLAMA, {"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
    (LLAMA, {"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
    (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    (LLAMA, {"rope_theta": 0}, ["rope_theta"]),
    (LLAMA, {"rope_theta": "1e4"}, ["rope_theta"]),
    (LLAMA, {"rope_scaling": [4.0]}, ["rope_scaling must be a mapping"]),
    (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 4}}, ["'longrope'", "yarn"]),
    (LLAMA, {"rope_scaling": {"type": ["linear"], "factor": 4}}, ["rope_scaling has type"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4}}, ["contradict"]),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, ["of type linear needs factor"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": None}}, ["of type linear needs factor"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, ["rope_scaling.factor must be a finite number"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.25}}, ["rope_scaling.factor", "at least 1"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1e300}}, ["rope_scaling.factor"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4, "mscale": 1}}, ["rope_scaling.mscale has no meaning"]),
    (
        LLAMA,
        {"rope_scaling": {**YARN, "rope_theta": 5e5}},
        ["rope_theta is 100000", "rope_theta is 500000"],
    ),
    (LLAMA, {"rope_scaling": {**YARN, "truncate": False}}, ["rope_scaling.truncate is False"]),
    (LLAMA, {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, ["beta_fast", "beta_slow 32"]),
    (LLAMA, {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, ["original_max_position_embeddings"]),
    (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor must exceed low_freq_factor 1"]),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["needs low_freq_factor, high_freq_factor, orig"]),
    (V2, {"qk_rope_head_dim": 15}, ["qk_rope_head_dim is 15", "even"]),
    (V2, {"kv_lora_rank": None}, ["kv_lora_rank is missing"]),
    (V2, {"num_key_value_heads": 3}, ["num_key_value_heads 3 does not divide"]),
    (V2, {"use_mla": False}, ["use_mla is false"]),
    (V2, {"n_routed_experts": 10**6}, ["n_routed_experts must be an integer"]),
    (V2, {"n_shared_experts": None}, ["n_shared_experts is missing"]),
    (V2, {"topk_method": "noaux_tc"}, ["topk_method is 'noaux_tc'", "group_limited_greedy"]),
    (V2, {"scoring_func": "sigmoid"}, ["scoring_func is 'sigmoid'"]),
    (V2, {"n_group": 3}, ["n_group 3 does not divide n_routed_experts 16"]),
    (V2, {"topk_group": 5}, ["topk_group 5 exceeds n_group 4"]),
    (V2, {"num_experts_per_tok": 9}, ["num_experts_per_tok 9 exceeds the 8 experts routing can reach"]),
    (V2, {"rope_interleave": 1}, ["rope_interleave must be true or false"]),
    (MOE, {"routed_scaling_factor": 2.0}, ["routed_scaling_factor is 2.0", "1.0 only"]),
    (MOE, {"n_group": 4}, ["n_group is 4", "1 only"]),
    (MOE, {"topk_method": "group_limited_greedy"}, ["topk_method is 'group_limited_greedy'", "greedy"]),
    (MOE, {"num_experts_per_tok": 17}, ["num_experts_per_tok 17 exceeds the 16 experts"]),
    (QWEN2, {"use_sliding_window": True}, ["use_sliding_window is True", "False only", "last sliding_window tokens"]),
    (QWEN2, {"use_mrope": True}, ["use_mrope is True"]),
    (QWEN2, {"attention_bias": True}, ["attention_bias is True"]),
    (QWEN2, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["layer_types"]),
    (V3, {"topk_method": "greedy"}, ["topk_method is 'greedy'", "noaux_tc"]),
    (V3, {"scoring_func": "softmax"}, ["scoring_func is 'softmax'", "sigmoid"]),
    (V3, {"n_group": None}, ["n_group is missing"]),
    (V3, {"norm_topk_prob": None}, ["norm_topk_prob is missing"]),
    (V3, {"n_group": 16, "topk_group": 8}, ["n_group 16 leaves one expert to a group"]),
    (V3, {"num_experts_per_tok": 9}, ["num_experts_per_tok 9 exceeds the 8 experts"]),
    (V3, {"num_nextn_predict_layers": 17}, ["num_nextn_predict_layers must be an integer"]),
    (V2, {"routed_scaling_factor": None, "num_experts_per_tok": None}, ["num_experts_per_tok is missing"]),
]


@pytest.mark.parametrize(("base", "changes", "expected"), REFUSED)
def test_nonsense_is_refused_by_file_and_key(
    base: dict[str, Any], changes: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_architecture(base | changes, "some/config.json")
    for text in ["some/config.json", *expected]:
        assert text in caught.value.message
    assert caught.value.hint
    assert len(caught.value.message) < 300


def test_missing_q_lora_rank_is_not_guessed() -> None:
    without = {key: value for key, value in V2.items() if key != "q_lora_rank"}
    with pytest.raises(CheckpointError, match="q_lora_rank is missing"):
        parse_architecture(without)


@pytest.mark.parametrize("changes", [{"norm_topk_prob": True}, {"moe_layer_freq": 2}])
def test_settings_without_a_reference_are_refused_by_it(changes: dict[str, Any]) -> None:
    for base in (V2, V3) if "moe_layer_freq" in changes else (V2, MOE):
        parse_architecture(base | changes)
        with pytest.raises(CheckpointError, match=next(iter(changes))):
            build_hf_rotary(base | changes)
