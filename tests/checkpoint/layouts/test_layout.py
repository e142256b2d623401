"""Layouts against the fixtures' own names, parameter counts that the hub publishes, and configs that contradict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import Layout, layout_for
from pipeline.checkpoint.layouts.rows import LAYER, MODEL, Dimension, Row
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.errors import CheckpointError
from tests import fixtures

V2_LITE: dict[str, Any] = {
    **fixtures.V2_CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
# huggingface.co/deepseek-ai/deepseek-moe-16b-base
MOE_16B: dict[str, Any] = {
    **fixtures.MOE_CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
}
CODER_6B: dict[str, Any] = {
    **fixtures.LLAMA_CONFIG,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32256,
}
QWEN_1_5B: dict[str, Any] = {
    **fixtures.QWEN2_CONFIG,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
QWEN_7B: dict[str, Any] = {
    **QWEN_1_5B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
DISTILL_LLAMA_8B: dict[str, Any] = {
    **fixtures.LLAMA_CONFIG,
    **fixtures.R1_DISTILL_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
V3: dict[str, Any] = {
    **fixtures.V3_CONFIG,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def layout_of(config: dict[str, Any]) -> Layout:
    return layout_for(parse_architecture(config))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (V2_LITE, 15_706_484_224),
        (V2, 235_741_434_880),
        (MOE_16B, 16_375_728_128),
        (CODER_6B, 6_740_512_768),
        (QWEN_1_5B, 1_777_088_000),
        (QWEN_7B, 7_615_616_512),
        (DISTILL_LLAMA_8B, 8_030_261_248),
        # Without the MTP layer; transformers counts the 58 correction biases of 256 as buffers, not parameters.
        (V3 | {"num_nextn_predict_layers": 0}, 671_026_404_352 + 58 * 256),
    ],
)
def test_parameter_count_is_the_hubs(config: dict[str, Any], parameters: int) -> None:
    mappings = layout_of(config).mappings()
    assert sum(m.elements for m in mappings) == parameters
    assert len({m.target for m in mappings}) == len(mappings)


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (fixtures.llama, {}),
        (fixtures.llama, {"attention_bias": True, "mlp_bias": True, "head_dim": 64}),
        (fixtures.llama, {"tie_word_embeddings": True}),
        (fixtures.deepseek_moe, {}),
        (fixtures.deepseek_moe, {"num_hidden_layers": 5, "moe_layer_freq": 2, "attention_bias": True}),
        (fixtures.deepseek_v2, {}),
        (fixtures.deepseek_v2, {"q_lora_rank": None, "first_k_dense_replace": 0}),
        (fixtures.deepseek_v2, {"attention_bias": True}),
        (fixtures.deepseek_v2, fixtures.V2_LITE_SHAPES),
        (fixtures.qwen2, {}),
        (fixtures.qwen2, {"tie_word_embeddings": True}),
        (fixtures.deepseek_v3, {}),
        (fixtures.deepseek_v3, {"fp8": True}),
        (fixtures.deepseek_v3, {"mtp": False}),
        (fixtures.deepseek_v3, {"num_nextn_predict_layers": 2, "fp8": True}),
    ],
)
def test_every_tensor_has_one_place_and_comes_back(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    source = CheckpointFolder.open(write(tmp_path / "m", **options))
    present, unused = layout_for(source.architecture).match(source.tensors, "test")
    assert unused == []
    assert sorted(name for m in present for name in m.sources) == sorted(source.tensors)
    for mapping in present:
        parts = [source.read(name).to_torch() for name in mapping.sources]
        whole = mapping.forward(parts)
        assert whole.shape == mapping.target_shape
        for part, back in zip(parts, mapping.backward(whole), strict=True):
            assert torch.equal(part.view(torch.uint8), back.view(torch.uint8))


def test_llama_names_and_orders(llama_path: Path) -> None:
    source = CheckpointFolder.open(llama_path)
    rows = {m.target: m for m in layout_for(source.architecture).mappings()}
    prefix = "model.layers.1."
    expected = {
        "attention.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "attention.dense.weight": ["self_attn.o_proj.weight"],
        "mlp.fc.weight": ["mlp.gate_proj.weight"],
        "mlp.gate.weight": ["mlp.up_proj.weight"],
        "mlp.proj.weight": ["mlp.down_proj.weight"],
        "input_layernorm.weight": ["input_layernorm.weight"],
        "post_layernorm.weight": ["post_attention_layernorm.weight"],
    }
    in_layer = {name: m for name, m in rows.items() if name.startswith("transformer.layers.1.")}
    assert {
        name.removeprefix("transformer.layers.1."): [s.removeprefix(prefix) for s in m.sources]
        for name, m in in_layer.items()
    } == expected
    outer = {name: m.sources for name, m in rows.items() if m.layer is None}
    assert outer == {
        "transformer.vocab_embedding.weight": ("model.embed_tokens.weight",),
        "transformer.ln_f.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    }
    parts = [source.read(name).to_torch() for name in in_layer["transformer.layers.1.attention.qkv.weight"].sources]
    qkv = in_layer["transformer.layers.1.attention.qkv.weight"].forward(parts)
    assert [torch.equal(*pair) for pair in zip(qkv.split([128, 64, 64]), parts, strict=True)] == [True] * 3


def test_deepseek_v2_names_roles_and_order(deepseek_v2_path: Path) -> None:
    source = CheckpointFolder.open(deepseek_v2_path)
    layout = layout_for(source.architecture)
    routed = layout.layer_mappings(1)
    names = {m.target.removeprefix("transformer.layers.1."): m for m in routed}
    assert names["mlp.experts.7.gate.weight"].sources == ("model.layers.1.mlp.experts.7.up_proj.weight",)
    assert names["mlp.experts.7.gate.weight"].expert == 7
    assert names["mlp.shared_expert.fc.weight"].sources == ("model.layers.1.mlp.shared_experts.gate_proj.weight",)
    assert names["mlp.router.weight"].sources == ("model.layers.1.mlp.gate.weight",)
    assert {m.role for m in routed} == {
        "norm", "attention_input", "attention_latent", "attention_output", "router", "shared_experts", "experts",
    }  # fmt: skip
    assert "transformer.layers.0.mlp.fc.weight" in {m.target for m in layout.layer_mappings(0)}
    layers = [m.layer for m in layout.mappings()]
    assert layers == [None, *sorted(layer for layer in layers if layer is not None), None, None]


def infos(config: dict[str, Any]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, "BF16", shape)
        for m in layout_of(config).mappings()
        for name, shape in zip(m.sources, m.source_shapes, strict=True)
    }


# What config.json claims, and what the message about the unchanged tensors must name.
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (fixtures.LLAMA_CONFIG, {"num_key_value_heads": 4}, ["layers.0.self_attn.k_proj.weight", "[64, 128]", "[128, 128]",
                                                        "num_key_value_heads * head_dim"]),
    (fixtures.LLAMA_CONFIG, {"intermediate_size": 512}, ["mlp.gate_proj.weight", "intermediate_size by hidden_size"]),
    (fixtures.LLAMA_CONFIG, {"vocab_size": 500}, ["model.embed_tokens.weight", "[500, 128]", "vocab_size"]),
    (fixtures.LLAMA_CONFIG, {"num_hidden_layers": 4}, ["model.layers.3.", "missing"]),
    (fixtures.LLAMA_CONFIG, {"num_hidden_layers": 2}, ["9 tensors have no place", "model.layers.2."]),
    (fixtures.LLAMA_CONFIG, {"attention_bias": True}, ["layers.0.self_attn.q_proj.bias is missing"]),
    (fixtures.V2_CONFIG, {"q_lora_rank": None}, ["self_attn.q_proj.weight is missing"]),
    (fixtures.V2_CONFIG, {"kv_lora_rank": 32}, ["kv_a_proj_with_mqa.weight", "kv_lora_rank + qk_rope_head_dim"]),
    (fixtures.V2_CONFIG, {"v_head_dim": 64}, ["kv_b_proj.weight", "(qk_nope_head_dim + v_head_dim)"]),
    (fixtures.V2_CONFIG, {"n_shared_experts": 1}, ["shared_experts.gate_proj", "* n_shared_experts"]),
    (fixtures.V2_CONFIG, {"n_routed_experts": 32}, ["mlp.gate.weight", "[16, 128]", "[32, 128]", "n_routed_experts"]),
    (fixtures.V2_CONFIG, {"first_k_dense_replace": 2}, ["model.layers.1.mlp.gate_proj.weight is missing"]),
]  # fmt: skip


@pytest.mark.parametrize(("base", "change", "expected"), CONTRADICTIONS)
def test_contradicting_config_names_tensor_shapes_and_keys(
    base: dict[str, Any], change: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(base | change).match(infos(base), "folder")
    for text in ["folder", *expected]:
        assert text in caught.value.message
    assert caught.value.hint


def test_biases_that_config_denies_are_refused() -> None:
    tensors = infos(fixtures.LLAMA_CONFIG | {"attention_bias": True})
    with pytest.raises(CheckpointError, match="no place") as caught:
        layout_of(fixtures.LLAMA_CONFIG).match(tensors, "folder")
    assert "attention_bias" in caught.value.hint


def test_constants_and_a_tied_head_are_listed_as_unused() -> None:
    tensors = infos(fixtures.LLAMA_CONFIG)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = TensorInfo(name, "F32", (16,))
    assert layout_of(fixtures.LLAMA_CONFIG).match(tensors, "folder")[1] == [name]
    tied = layout_of(fixtures.LLAMA_CONFIG | {"tie_word_embeddings": True})
    assert tied.match(tensors, "folder")[1] == ["lm_head.weight", name]


def test_optional_rows_may_be_absent_whole_but_not_in_part() -> None:
    rows = (
        Row(target="e", sources=("e",), rows=("n",), role="norm", where=MODEL),
        Row(target="l.{l}", sources=("a.{l}", "b.{l}"), rows=("n", "n"), role="norm", where=LAYER, optional=True),
    )
    layout = Layout(parse_architecture(fixtures.LLAMA_CONFIG), rows, {"n": Dimension(4, "n")}, ())
    e, a = TensorInfo("e", "F32", (4,)), TensorInfo("a.1", "F32", (4,))
    assert [m.target for m in layout.match({"e": e}, "folder")[0]] == ["e"]
    with pytest.raises(CheckpointError, match=r"b\.1 is missing"):
        layout.match({"e": e, "a.1": a}, "folder")


def test_every_architecture_has_a_row_in_every_table() -> None:
    from pipeline.checkpoint.architecture import ARCHITECTURES
    from pipeline.checkpoint.layouts import LAYOUTS
    from pipeline.checkpoint.reference import MODULES
    from pipeline.network.decoder import BLOCKS

    assert ARCHITECTURES.keys() == LAYOUTS.keys() == MODULES.keys() == BLOCKS.keys()


def test_qwen2_has_biases_in_q_k_and_v_alone() -> None:
    rows = {m.target: m for m in layout_of(fixtures.QWEN2_CONFIG).layer_mappings(1)}
    assert [name for name in rows if name.endswith(".bias")] == ["transformer.layers.1.attention.qkv.bias"]
    bias = rows["transformer.layers.1.attention.qkv.bias"]
    assert bias.sources == tuple(f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv")
    assert bias.source_shapes == ((128,), (64,), (64,))


def test_the_mtp_layer_is_no_layer_of_the_decoder() -> None:
    layout = layout_of(fixtures.V3_CONFIG)
    mtp = layout.mtp_mappings()
    assert {m.role for m in mtp} == {"mtp"}
    assert {m.layer for m in mtp} == {None}
    assert all(m.target.startswith("transformer.mtp_layers.0.") for m in mtp)
    assert all(name.startswith("model.layers.3.") for m in mtp for name in m.sources)
    assert layout.mappings()[-len(mtp) :] == mtp
    assert not {m.target for m in mtp} & {m.target for m in (*layout.layer_mappings(2), *layout.outer_mappings())}
    by_name = {m.target.removeprefix("transformer.mtp_layers.0."): m.sources for m in mtp}
    assert by_name["eh_proj.weight"] == ("model.layers.3.eh_proj.weight",)
    assert by_name["shared_head.head.weight"] == ("model.layers.3.shared_head.head.weight",)
    assert by_name["mlp.experts.7.gate.weight"] == ("model.layers.3.mlp.experts.7.up_proj.weight",)


def test_the_correction_bias_is_never_cast() -> None:
    rows = {m.target: m for m in layout_of(fixtures.V3_CONFIG).mappings()}
    kept = [name for name, m in rows.items() if not m.cast]
    assert kept == [
        *(f"transformer.layers.{layer}.mlp.router.e_score_correction_bias" for layer in (1, 2)),
        "transformer.mtp_layers.0.mlp.router.e_score_correction_bias",
    ]
    assert rows[kept[0]].sources == ("model.layers.1.mlp.gate.e_score_correction_bias",)


def test_half_an_mtp_layer_is_refused_and_none_is_fine() -> None:
    tensors, layout = infos(fixtures.V3_CONFIG), layout_of(fixtures.V3_CONFIG)
    without = {name: info for name, info in tensors.items() if not name.startswith("model.layers.3.")}
    assert not any(m.role == "mtp" for m in layout.match(without, "folder")[0])
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    lean = {name: info for name, info in tensors.items() if name not in copies}
    assert len(layout.match(lean, "folder")[0]) == len(layout.mappings()) - 2
    del tensors["model.layers.3.mlp.experts.5.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\.mlp\.experts\.5\.up_proj\.weight is missing"
    ) as caught:
        layout.match(tensors, "folder")
    assert "num_nextn_predict_layers" in caught.value.hint


FP8_WEIGHT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda t: t.pop(f"{FP8_WEIGHT}_scale_inv"), f"{FP8_WEIGHT}_scale_inv is missing"),
        (lambda t: t.update({FP8_WEIGHT: TensorInfo(FP8_WEIGHT, "BF16", (64, 128))}), "no place"),
        (
            lambda t: t.update(
                {f"{FP8_WEIGHT}_scale_inv": TensorInfo(f"{FP8_WEIGHT}_scale_inv", "F32", (2, 1))}
            ),
            "has shape [2, 1], config.json asks for [1, 1]",
        ),
        (
            lambda t: t.update(
                {f"{FP8_WEIGHT}_scale_inv": TensorInfo(f"{FP8_WEIGHT}_scale_inv", "BF16", (1, 1))}
            ),
            "_scale_inv is BF16",
        ),
    ],
)  # fmt: skip
def test_fp8_weights_need_their_scales(damage: Any, expected: str, tmp_path: Path) -> None:
    source = CheckpointFolder.open(fixtures.deepseek_v3(tmp_path / "m", fp8=True))
    tensors = dict(source.tensors)
    layout = layout_for(source.architecture)
    present, _ = layout.match(tensors, "folder")
    targets = [m.target for m in present]
    place = targets.index("transformer.layers.1.mlp.experts.5.gate.weight")
    assert targets[place + 1] == "transformer.layers.1.mlp.experts.5.gate.weights_block_scaling_factor"
    damage(tensors)
    with pytest.raises(CheckpointError) as caught:
        layout.match(tensors, "folder")
    assert expected in caught.value.message


@pytest.mark.parametrize("write", [fixtures.deepseek_v2, fixtures.deepseek_v3])
def test_a_deepseek_of_dense_layers_only(write: Any, tmp_path: Path) -> None:
    """`n_routed_experts: null`, as DeepSeek's own code reads it."""
    options = {} if write is fixtures.deepseek_v2 else {"mtp": False}
    path = write(tmp_path, num_hidden_layers=2, first_k_dense_replace=2, **options)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_routed_experts": None}))
    source = CheckpointFolder.open(path)
    assert source.architecture.experts is None
    mappings, unused = layout_for(source.architecture).match(source.tensors, "it")
    assert unused == []
    assert {name for mapping in mappings for name in mapping.sources} == set(source.tensors)
