"""What TensorRT-LLM's engines cannot run: each limit, what breaks and what keeps it. Mixed precision. config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.engine.tensorrt_llm.ask import Ask, StoredLinear
from pipeline.engine.tensorrt_llm.rank_config import make_config
from pipeline.engine.tensorrt_llm.rank_quantization import RankQuantization
from pipeline.engine.tensorrt_llm.support import LIMITS, check_support
from pipeline.errors import CompatibilityError
from pipeline.evaluation.rank_checkpoint import check_keys
from pipeline.evaluation.rank_proof import prove_ranks
from pipeline.quantization.selection import Override
from pipeline.sharding import Parallel
from tests import fixtures
from tests.engine.tensorrt_llm.rank_cases import make_engine, write

# huggingface.co/deepseek-ai/deepseek-coder-6.7b-base
CODER = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
PLAIN = RankQuantization(algo=None, config={"quant_algo": None, "kv_cache_quant_algo": None}, layers={})


def parse(config: dict[str, Any], **keys: Any) -> Architecture:
    return parse_architecture({**config, **keys})


def linear(
    name: str, rows: int, columns: int, form: str | None, group: int | None = None, layer: int = 0
) -> StoredLinear:
    return StoredLinear(
        name=f"transformer.layers.{layer}.{name}", out_features=rows, in_features=columns, format=form, group=group
    )


def ask(architecture: Architecture, *linears: StoredLinear, sm: int = 90, dtype: str = "float16", **sizes: int) -> Ask:
    return Ask(architecture=architecture, linears=linears, dtype=dtype, parallel=Parallel(**sizes), sm=sm)


LLAMA, MOE = parse(fixtures.LLAMA_CONFIG, **CODER), parse(fixtures.MOE_CONFIG)
DOWN = linear("mlp.proj", 4096, 11008, "int4", 128)
W4A8 = replace(DOWN, format="int4_fp8")
SECOND, THIRD = (replace(DOWN, name=f"transformer.layers.{i}.mlp.proj", format=None) for i in (1, 2))
FOUR = replace(LLAMA, num_layers=4)
EXPERT = replace(linear("mlp.experts.0.fc", 64, 128, "fp8", layer=1), expert=0)
# limit, what breaks it, what keeps it, a piece of the message
CASES = [
    ("runs_architecture", ask(parse(fixtures.V2_CONFIG)), ask(LLAMA), "multi-head latent attention"),
    ("runs_architecture", ask(parse(fixtures.V3_CONFIG)), ask(MOE), "no class for DeepseekV3ForCausalLM"),
    ("runs_routing", ask(parse(fixtures.MOE_CONFIG, first_k_dense_replace=2)), ask(MOE), "first_k_dense_replace 2"),
    ("runs_routing", ask(parse(fixtures.MOE_CONFIG, norm_topk_prob=True)), ask(MOE), "norm_topk_prob true"),
    ("runs_experts", ask(MOE, replace(EXPERT, format="int4", group=64)), ask(MOE, EXPERT), "TypeError in SharedMoE"),
    (
        "runs_moe_whole",
        ask(MOE, EXPERT, linear("mlp.shared_expert.fc", 128, 128, None, layer=1)),
        ask(MOE, EXPERT, linear("mlp.shared_expert.fc", 128, 128, "fp8", layer=1)),
        "they are one module",
    ),
    (
        "runs_experts_apart",
        ask(MOE, EXPERT, tensor=2, expert=2),
        ask(MOE, replace(EXPERT, format=None), tensor=2, expert=2),
        "wants moe_ep_size 1",
    ),
    ("no_fp8_blocks", ask(LLAMA, replace(DOWN, format="fp8_blocks")), ask(LLAMA, DOWN), "128 x 128 blocks"),
    ("no_fp8_rows", ask(LLAMA, replace(DOWN, format="fp8_rows")), ask(LLAMA, DOWN), "a scale for each output"),
    ("head_in_16_bits", replace(ask(LLAMA), head="int8"), ask(LLAMA), "exclude_modules has lm_head always"),
    ("no_integers_on_blackwell", ask(LLAMA, DOWN, sm=100), ask(LLAMA, DOWN, sm=120), "int4 on SM100"),
    ("w4a8_needs_ada", ask(LLAMA, W4A8, sm=80), ask(LLAMA, DOWN, sm=80), "Ada's and Hopper's"),
    ("engines_in_16_bits", ask(LLAMA, dtype="float32"), ask(LLAMA, dtype="bfloat16"), "weights in float32"),
    ("group_has_kernels", ask(LLAMA, replace(DOWN, group=32)), ask(LLAMA, replace(DOWN, group=64)), "groups of 32"),
    ("kernels_divide", ask(LLAMA, DOWN, tensor=4), ask(LLAMA, DOWN, tensor=2), "11008 inputs, no multiple of 128 x"),
    ("sizes_divide", ask(LLAMA, tensor=3), ask(LLAMA, tensor=4), "size 3 does not divide the model's 32"),
    (
        "mixed_precision",
        ask(LLAMA, DOWN, linear("mlp.fc", 11008, 4096, "int8")),
        ask(LLAMA, DOWN, linear("mlp.fc", 11008, 4096, "fp8")),
        "INT8 weights (method int8) beside int4",
    ),
    ("stages_alike", ask(LLAMA, pipeline=2), ask(LLAMA, pipeline=3), "does not divide the model's 3 decoder layers"),
    (
        "stages_alike",
        ask(FOUR, DOWN, THIRD, pipeline=2),
        ask(FOUR, DOWN, SECOND, pipeline=2),
        "both are layer 0 of their pipeline stage",
    ),
]


@pytest.mark.parametrize(("name", "broken", "kept", "message"), CASES)
def test_limits(name: str, broken: Ask, kept: Ask, message: str) -> None:
    limit = next(limit for limit in LIMITS if limit.name == name)
    assert message in (limit.find(broken) or "")
    assert limit.find(kept) is None
    with pytest.raises(CompatibilityError, match="TensorRT-LLM cannot run this") as refused:
        check_support(broken)
    assert limit.way_out in refused.value.hint


def test_every_limit_has_a_test() -> None:
    assert {case[0] for case in CASES} == {limit.name for limit in LIMITS}


HUB_SIZES = {  # hidden, intermediate, heads, key/value heads -> tensor parallel sizes of INT4 in groups of 128
    "LLM-7B, Coder-6.7B": ((4096, 11008, 32, 32), {1, 2}),
    "R1-Distill-Qwen-7B": ((3584, 18944, 28, 4), {1, 2, 4}),
    "R1-Distill-Llama-8B": ((4096, 14336, 32, 8), {1, 2, 4, 8}),
}


@pytest.mark.parametrize("name", HUB_SIZES)
def test_tensor_sizes_of_the_hubs_models_in_int4(name: str) -> None:
    (hidden, inner, heads, kv), expected = HUB_SIZES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv}
    a = parse(fixtures.LLAMA_CONFIG, **sizes)
    linears = (linear("mlp.proj", hidden, inner, "int4", 128), linear("mlp.fc", inner, hidden, "int4", 128))
    find = next(limit.find for limit in LIMITS if limit.name == "kernels_divide")
    assert {size for size in (1, 2, 4, 8) if find(ask(a, *linears, tensor=size)) is None} == expected


def test_mixed_precision(tmp_path: Path) -> None:
    """Attention in FP8, the MLP in INT4 but for what stays as it is; quant_cfg.json counts a stage's layers from 0."""
    recipe = (
        Override(pattern="*.attention.*", method="fp8"),
        Override(pattern="*.mlp.proj", method="none"),
    )
    engine = make_engine(tmp_path, "llama", "awq", settings={"recipe": recipe, "method": "rtn"})
    report = write(engine, tmp_path / "ranks", tensor=2, pipeline=2)
    assert report.quant_algo == "MIXED_PRECISION"
    assert prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0).holds
    layers = json.loads((tmp_path / "ranks" / "quant_cfg.json").read_text())["quantized_layers"]
    assert layers == {
        "transformer.layers.0.attention.dense": {"quant_algo": "FP8"},
        "transformer.layers.0.attention.qkv": {"quant_algo": "FP8"},
        **{
            f"transformer.layers.0.mlp.{name}": {
                "quant_algo": "W4A16_AWQ",
                "group_size": 64,
                "has_zero_point": False,
                "pre_quant_scale": True,
            }
            for name in ("fc", "gate")
        },
    }


def test_a_linear_left_out_is_excluded_by_name(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "llama", "fp8", settings={"exclude": ("*.attention.dense",)})
    write(engine, tmp_path / "ranks", pipeline=2)
    quantization = json.loads((tmp_path / "ranks" / "config.json").read_text())["quantization"]
    assert quantization["exclude_modules"][-1] == "transformer.layers.0.attention.dense"
    assert quantization["exclude_modules"].count("transformer.layers.0.attention.dense") == 1
    assert prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0).holds


ROPES: list[tuple[str, dict[str, Any] | None, int]] = [
    ("default", None, 256),
    ("linear", {"type": "linear", "factor": 4.0}, 256),
    ("dynamic", {"type": "dynamic", "factor": 2.0}, 256),
    (
        "yarn",
        {
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 64,
        },
        256,
    ),
    (
        "llama3",
        {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        256,
    ),
]


@pytest.mark.parametrize(("kind", "expected", "positions"), ROPES)
def test_rope(kind: str, expected: dict[str, Any] | None, positions: int) -> None:
    a = parse(fixtures.LLAMA_CONFIG, rope_scaling=fixtures.LLAMA_ROPES[kind])
    config = make_config(a, "bfloat16", Parallel(), PLAIN)
    assert config["rotary_scaling"] == expected
    assert (config["rotary_base"], config["max_position_embeddings"]) == (100000.0, positions)


def test_yarns_table_reaches_the_scaled_context() -> None:
    """Qwen2's config.json states the unscaled one, and TensorRT-LLM's table has that many rows."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = make_config(parse(fixtures.QWEN2_CONFIG, rope_scaling=rope), "float16", Parallel(), PLAIN)
    assert (config["max_position_embeddings"], config["qwen_type"]) == (1024, "qwen2")
    with pytest.raises(CompatibilityError, match="attention_factor"):
        a = parse(fixtures.QWEN2_CONFIG, rope_scaling={**rope, "attention_factor": 1.5})
        make_config(a, "float16", Parallel(), PLAIN)


@pytest.mark.parametrize("config", [fixtures.LLAMA_CONFIG, fixtures.QWEN2_CONFIG, fixtures.MOE_CONFIG])
def test_keys_are_known_to_tensorrt_llm(config: dict[str, Any]) -> None:
    made = make_config(parse(config), "float16", Parallel(tensor=4, expert=2, pipeline=3), PLAIN)
    check_keys(made, "config.json")
    assert made["mapping"] == {
        "world_size": 12,
        "tp_size": 4,
        "pp_size": 3,
        "cp_size": 1,
        "moe_tp_size": 2,
        "moe_ep_size": 2,
    }
    assert made["hidden_act"] == ("swiglu" if "moe" in made else "silu")
