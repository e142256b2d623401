"""Writes a Llama as GGUF for llama.cpp, the linears of its layers in Q4_0: only what a benchmark needs.

The vocabulary is made up: prompts go in as token ids, and what comes out is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, linears: str, head: str
) -> None:
    """`state`: a hub state dict. linears, head: ggml types by name ("Q4_0", "Q8_0", "BF16"), the head's also the
    embedding's."""
    writer = gguf.GGUFWriter(path, "llama")
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(vocabulary)
    _add_vocabulary(writer, vocabulary)
    kinds = {
        "linear": gguf.GGMLQuantizationType[linears],
        "head": gguf.GGMLQuantizationType[head],
        "norm": gguf.GGMLQuantizationType.F32,
    }
    for name, tensor in state.items():
        target = OUTER.get(name) or _layer_name(name)
        values = tensor.float().numpy()
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            values = _pair(values, heads if "attn_q" in target else config["num_key_value_heads"])
        kind = kinds["norm" if tensor.dim() == 1 else "head" if name in OUTER else "linear"]
        writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layer_name(name: str) -> str:
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{LAYER[module]}.weight"


def _pair(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows from halves to pairs, which llama.cpp's RoPE turns."""
    out_features, in_features = weight.shape
    halves = weight.reshape(heads, 2, out_features // heads // 2, in_features)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(out_features, in_features))


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    special = ["<unk>", "<s>", "</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"▁t{token}" for token in range(len(special), size))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(
        [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.NORMAL] * (size - 3)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
