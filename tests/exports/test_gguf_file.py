"""GGUF files, read back by the gguf library: keys, names, types, every number; and run by llama.cpp."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES, GGUFReader
from gguf.quants import dequantize

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state, hf_outer_state
from pipeline.errors import CompatibilityError
from pipeline.exports.formats import export_checkpoint
from pipeline.exports.gguf_metadata import GROUPS_NOTE, NO_RANK_NOTE
from tests import fixtures
from tests.exports import support

GREEDY = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
YARN = {**(fixtures.V2_ROPES["yarn"] or {}), "mscale": 0.707, "mscale_all_dim": 0.707}
YARN_V3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
Arrays = dict[str, np.ndarray[Any, Any]]


def read_keys(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}


def read_tensors(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Dequantized by the library, and the type of each."""
    tensors = GGUFReader(path).tensors
    # A copy: plain floats are read-only views of the file.
    values = {t.name: np.array(dequantize(np.asarray(t.data), t.tensor_type), np.float32) for t in tensors}
    return values, {t.name: t.tensor_type.name for t in tensors}


def expect(engine: CheckpointFolder, *, halves: bool) -> Arrays:
    """What llama.cpp's names must hold, written out from the hub's. `halves`: RoPE turns halves on the hub, pairs in
    llama.cpp."""
    a = engine.architecture
    found = {name: tensor.float().numpy() for name, tensor in hf_outer_state(engine, a).items()}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    result = {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in found.items()}
    attention = {"o_proj": "output", "kv_a_proj_with_mqa": "kv_a_mqa", "q_a_layernorm": "q_a_norm"}
    attention |= {"kv_a_layernorm": "kv_a_norm"} | {f"{p}_proj": p for p in ("q", "k", "v", "q_a", "q_b")}
    for layer in range(a.num_layers):
        state = {name: value.float().numpy() for name, value in hf_layer_state(engine, a, layer).items()}
        at = f"blk.{layer}."
        result[f"{at}attn_norm.weight"] = state.pop("input_layernorm.weight")
        result[f"{at}ffn_norm.weight"] = state.pop("post_attention_layernorm.weight")
        if a.latent is not None:
            whole = state.pop("self_attn.kv_b_proj.weight").reshape(a.num_heads, -1, a.latent.kv_lora_rank)
            nope = a.latent.qk_nope_head_dim
            result[f"{at}attn_k_b.weight"] = whole[:, :nope].transpose(0, 2, 1)
            result[f"{at}attn_v_b.weight"] = whole[:, nope:]
        if a.is_routed(layer) and a.experts is not None:
            result[f"{at}ffn_gate_inp.weight"] = state.pop("mlp.gate.weight")
            if "mlp.gate.e_score_correction_bias" in state:
                result[f"{at}exp_probs_b.bias"] = state.pop("mlp.gate.e_score_correction_bias")
            for part in ("gate", "up", "down"):
                every = [state.pop(f"mlp.experts.{e}.{part}_proj.weight") for e in range(a.experts.num_routed)]
                result[f"{at}ffn_{part}_exps.weight"] = np.stack(every)
        for name, value in state.items():
            module, _, kind = name.rpartition(".")
            if module.startswith("mlp."):
                target = f"ffn_{module.split('.')[-1].removesuffix('_proj')}{'_shexp' if 'shared' in module else ''}"
            else:
                target = f"attn_{attention[module.removeprefix('self_attn.')]}"
            if halves and target in ("attn_q", "attn_k"):
                value = np.concatenate(
                    [np.stack([h[: len(h) // 2], h[len(h) // 2 :]], 1).reshape(h.shape)
                     for h in np.split(value, len(value) // a.head_dim)]
                )  # fmt: skip
            result[f"{at}{target}.{kind}"] = value
    return result


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "llama", {"dtype": "float16", "tie_word_embeddings": True, "head_dim": 16}),
    ("qwen2", "qwen2", {}),
    ("moe", "deepseek", {}),
    ("v2", "deepseek2", {"rope": "default"}),
    ("v2", "deepseek2", {"rope_scaling": YARN, "q_lora_rank": None, **GREEDY}),
    ("v3", "deepseek2", {"rope_scaling": YARN_V3}),
]


@pytest.mark.parametrize(("name", "architecture", "options"), CASES)
def test_every_number_is_there(name: str, architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    """16 bits stay 16 bits, bit for bit; names are those that the library knows of the architecture."""
    engine = support.convert(name, tmp_path, **options)
    export_checkpoint(engine, tmp_path / "out", "gguf")
    values, kinds = read_tensors(tmp_path / "out/model.gguf")
    wanted = expect(engine, halves=architecture in ("llama", "deepseek"))
    assert values.keys() == wanted.keys()
    for key, value in wanted.items():
        assert np.array_equal(values[key], value), key
        stored = {"float16": "F16"}.get(options.get("dtype", ""), "BF16")
        assert kinds[key] == ("F32" if value.ndim == 1 or "gate_inp" in key else stored), key
    known = {TENSOR_NAMES[kind] for kind in MODEL_TENSORS[MODEL_ARCH[architecture.upper()]]}
    for key in values:
        module = key.rpartition(".")[0]
        assert (module.replace(module.split(".")[1], "{bid}", 1) if "blk" in module else module) in known, key


def test_keys_of_a_llama(tmp_path: Path) -> None:
    """The hub's numbers under the library's constants; the vocabulary, filled up, and the chat template."""
    engine = support.convert("llama", tmp_path, rope="yarn")
    export_checkpoint(engine, tmp_path / "out", "gguf")
    keys = read_keys(tmp_path / "out/model.gguf")
    assert keys["general.architecture"] == "llama"
    wanted = {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 128,
        "feed_forward_length": 256,
        "rope.dimension_count": 32,
        "rope.freq_base": 100000.0,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.type": "yarn",
        "vocab_size": 512,
    }
    assert {key: keys[f"llama.{key}"] for key in wanted} == wanted
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == 512
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert "bos_token" in keys["tokenizer.chat_template"]


def test_keys_of_a_v3(tmp_path: Path) -> None:
    engine = support.convert("v3", tmp_path, rope_scaling=YARN_V3)
    report = export_checkpoint(engine, tmp_path / "out", "gguf")
    assert all(name.startswith("transformer.mtp_layers.0.") for name in report.left_out)
    assert len(report.notes) == 1 and "tensors left out" in report.notes[0]
    keys = read_keys(tmp_path / "out/model.gguf")
    wanted = {
        "attention.head_count_kv": 1,
        "attention.key_length": 80,
        "attention.key_length_mla": 48,
        "attention.kv_lora_rank": 64,
        "attention.q_lora_rank": 64,
        "attention.value_length": 64,
        "attention.value_length_mla": 32,
        "expert_count": 16,
        "expert_feed_forward_length": 64,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_count": 1,
        "expert_used_count": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 16,
    }
    assert {key: keys[f"deepseek2.{key}"] for key in wanted} == wanted
    assert keys["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)


def test_factors_of_llama3_are_transformers_own(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    engine = support.convert("llama", tmp_path, rope="llama3")
    export_checkpoint(engine, tmp_path / "out", "gguf")
    factors = torch.from_numpy(read_tensors(tmp_path / "out/model.gguf")[0]["rope_freqs.weight"])
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path / "hf"), "cpu")
    plain = 100000.0 ** (-torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(plain / factors, expected, rtol=1e-5, atol=0)
    assert len(set(factors.tolist())) > 3


@pytest.mark.parametrize(("name", "group"), [("llama", 128), ("llama", 32), ("v2", 64)])
def test_int4_is_q4_0_exactly(name: str, group: int, tmp_path: Path) -> None:
    """A group of 64 or 128 is two or four blocks of one scale; experts are stacked in their blocks."""
    engine = support.quantize(name, "gptq", tmp_path, group=group, **({"rope": "default"} if name == "v2" else {}))
    report = export_checkpoint(engine, tmp_path / "out", "gguf")
    assert not report.widened
    values, kinds = read_tensors(tmp_path / "out/model.gguf")
    for key, value in expect(engine, halves=name == "llama").items():
        assert np.array_equal(values[key], value), key
    quantized = [key for key, kind in kinds.items() if kind == "Q4_0"]
    assert {key.partition(".")[2].partition(".")[2] for key in quantized} >= {"attn_output.weight", "ffn_gate.weight"}
    if name == "v2":
        assert "blk.1.ffn_down_exps.weight" in quantized
    assert read_keys(tmp_path / "out/model.gguf")["general.file_type"] == 2


def test_an_int4_head_is_q4_0(tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path, recipe={"lm_head": "rtn"}, group=32, dtype="float16")
    export_checkpoint(engine, tmp_path / "out", "gguf")
    values, kinds = read_tensors(tmp_path / "out/model.gguf")
    assert kinds["output.weight"] == "Q4_0"
    assert np.array_equal(values["output.weight"], hf_outer_state(engine, engine.architecture)["lm_head.weight"])


def test_int8_is_q8_0_where_its_scales_are_float16(tmp_path: Path) -> None:
    """Which they are not, in general: then it is refused, or 16 bits."""

    def round_scales(tensors: fixtures.Tensors) -> None:
        for name in tensors:
            if name.endswith("per_channel_scale") and ".0." in name:
                tensors[name] = tensors[name].half().float()

    engine = support.damage(support.quantize("llama", "int8", tmp_path, dtype="float32"), round_scales)
    with pytest.raises(CompatibilityError, match=r"layers\.1\.self_attn\.q_proj and .* are no float16"):
        export_checkpoint(engine, tmp_path / "out", "gguf")
    report = export_checkpoint(engine, tmp_path / "out", "gguf", others="16bit")
    assert report.quantized == {"int8": 7}
    values, kinds = read_tensors(tmp_path / "out/model.gguf")
    for key, value in expect(engine, halves=True).items():
        assert np.array_equal(values[key], value), key
        assert (kinds[key] == "Q8_0") == ("blk.0." in key and value.ndim == 2)


def test_experts_of_a_layer_are_of_one_type(tmp_path: Path) -> None:
    recipe = {"*.layers.1.mlp.experts.3.fc": "none"}
    engine = support.quantize("v2", "rtn", tmp_path, recipe=recipe, group=32, rope="default")
    with pytest.raises(CompatibilityError, match=r"experts\.0\.gate_proj cannot be exported as gguf: the experts"):
        export_checkpoint(engine, tmp_path / "out", "gguf")
    report = export_checkpoint(engine, tmp_path / "out", "gguf", others="16bit")
    assert len(report.widened) == 15
    kinds = read_tensors(tmp_path / "out/model.gguf")[1]
    assert kinds["blk.1.ffn_gate_exps.weight"] == "BF16" and kinds["blk.1.ffn_up_exps.weight"] == "Q4_0"


def test_what_llama_cpp_cannot_say(tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("v2", {}, "one number for YaRN's mscale and mscale_all_dim; here they are 1 and 0.707"),
        ("v2", {"rope": "default", "attention_bias": True}, "deepseek2 has no biases"),
        ("v3", {"rope": "default", "rope_interleave": False}, "deepseek2 turns pairs"),
        ("v2", {"rope": "default", "moe_layer_freq": 2, "num_hidden_layers": 3}, "moe_layer_freq is 2"),
        ("qwen2", {"rope_scaling": fixtures.LLAMA_ROPES["llama3"]}, "qwen2 has no RoPE scaling of type llama3"),
        ("moe", {"norm_topk_prob": True}, "deepseek neither normalizes nor scales"),
    ]
    for index, (name, options, reason) in enumerate(refused):
        place = tmp_path / str(index)
        place.mkdir()
        with pytest.raises(CompatibilityError, match=reason):
            export_checkpoint(support.convert(name, place, **options), place / "out", "gguf")
        assert not list(place.glob("*out*"))


def test_what_llama_cpp_does_differently_is_said(tmp_path: Path) -> None:
    engine = support.convert("v2", tmp_path, rope="default", q_lora_rank=None)
    assert export_checkpoint(engine, tmp_path / "out", "gguf").remarks == [GROUPS_NOTE, NO_RANK_NOTE]


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = support.convert("llama", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CompatibilityError, match="gguf library, which is not installed") as caught:
        export_checkpoint(engine, tmp_path / "out", "gguf")
    assert caught.value.hint == "pip install 'trtseek[exports]'"
    assert not (tmp_path / "out").exists()


RUN: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "", {"rope": "default"}),
    ("llama", "", {"rope": "linear", "attention_bias": True, "tie_word_embeddings": True}),
    ("llama", "", {"rope": "yarn"}),
    ("llama", "", {"rope": "llama3"}),
    ("llama", "rtn", {"rope": "default"}),
    ("qwen2", "", {}),
    ("qwen2", "gptq", {"rope_scaling": fixtures.LLAMA_ROPES["yarn"]}),
    ("moe", "", {}),
    ("v2", "", {"rope_scaling": YARN, **GREEDY}),
    ("v2", "", {"rope_scaling": YARN, **GREEDY, "q_lora_rank": None, "num_hidden_layers": 27}),
    ("v2", "rtn", {"rope": "default", **GREEDY}),
    ("v3", "", {"rope_scaling": YARN_V3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method", "options"), RUN)
def test_llama_cpp_goes_on_as_the_network_does(
    name: str, method: str, options: dict[str, Any], llamacpp: Any, tmp_path: Path
) -> None:
    """The same greedy tokens beyond the original context, and their probabilities. llama.cpp rounds the inputs of
    Q4_0 to 8 bits, so that there its tokens are judged by how likely the network finds them."""
    options = {"dtype": "float16" if method else "float32", **options}
    engine = (
        support.quantize(name, method, tmp_path, **options) if method else support.convert(name, tmp_path, **options)
    )
    support.spell_tokens(engine.path / "tokenizer.json", engine.architecture.vocab_size)
    export_checkpoint(engine, tmp_path / "out", "gguf")
    prompt = torch.randint(2, 500, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    (found,) = llamacpp(tmp_path / "out/model.gguf", [prompt], 16)
    logits = support.our_logits(engine, torch.tensor([prompt + found["ids"][:-1]]))[0, len(prompt) - 1 :]
    ours = torch.log_softmax(logits, -1)
    bound = 0.15 if method else 0.01
    for index, (token, logprob) in enumerate(zip(found["ids"], found["logprobs"], strict=True)):
        assert math.isclose(float(ours[index, token]), logprob, abs_tol=bound), index
        assert float(ours[index].max() - ours[index, token]) < (bound if method else 1e-3), index
    if not method:
        assert found["ids"] == ours.argmax(-1).tolist()
