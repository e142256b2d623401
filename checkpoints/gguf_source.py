"""Reading a Llama-architecture GGUF file as Hugging Face tensors and a Hugging Face tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

try:
    from gguf import GGMLQuantizationType
    from gguf import GGUFReader as GGUFReader  # re-exported
    from gguf.quants import dequantize
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("reading GGUF needs gguf: pip install 'trtseek[checkpoints]'") from error

Floats = npt.NDArray[np.float32]

# GGUF name -> hub name; {n} is the layer.
TENSOR_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "blk.{n}.attn_q.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "blk.{n}.attn_k.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "blk.{n}.attn_v.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "blk.{n}.attn_output.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_gate.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.up_proj.weight",
    "blk.{n}.ffn_down.weight": "model.layers.{n}.mlp.down_proj.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# llama.cpp's converter reorders the rows of these for its interleaved RoPE; the field counts their heads.
PERMUTED: Mapping[str, str] = {
    "blk.{n}.attn_q.weight": "attention.head_count",
    "blk.{n}.attn_k.weight": "attention.head_count_kv",
}

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class GgufError(Exception):
    """The GGUF file is not what this reader knows: another architecture, tensor or tokenizer."""


def read_field(reader: GGUFReader, name: str) -> Any:
    """Return a metadata field's value, looked up as ``name``, then as ``llama.name``.

    Raises GgufError when it is missing.
    """
    for key in (name, f"llama.{name}"):
        field = reader.fields.get(key)
        if field is not None:
            return field.contents()
    raise GgufError(f"the GGUF file has no field {name!r}")


def dequantize_rows(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> Floats:
    """Return ``[out, in]`` (or ``[in]``) in fp32 from a tensor as stored: rows of quantized blocks, or plain floats."""
    # A copy: plain floats would be a read-only view of the file, which torch warns about.
    return np.array(dequantize(np.asarray(data), kind), dtype=np.float32)


def undo_permute(weight: Floats, heads: int) -> Floats:
    """Undo llama.cpp's row order of ``weight[heads * d, in]``: pairs (2i, 2i+1) back to halves (i, i + d/2).

    Source: ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """
    out, columns = weight.shape
    if out % (2 * heads):
        raise GgufError(f"{out} rows do not divide into {heads} heads of an even size")
    return weight.reshape(heads, out // heads // 2, 2, columns).swapaxes(1, 2).reshape(out, columns)


def read_tensors(reader: GGUFReader) -> Iterator[tuple[str, Floats]]:
    """Yield every tensor under its hub name, in fp32, in the hub's order of rows.

    Raises GgufError for an architecture other than llama or a tensor that has no hub name.
    """
    architecture = read_field(reader, "general.architecture")
    if architecture != "llama":
        raise GgufError(f"the GGUF file holds architecture {architecture!r}; this reader knows only 'llama'")
    for tensor in reader.tensors:
        layer = re.search(r"(?<=^blk\.)\d+", tensor.name)
        row = re.sub(r"^blk\.\d+", "blk.{n}", tensor.name)
        if row not in TENSOR_NAMES:
            raise GgufError(f"tensor {tensor.name!r} has no hub name")
        weight = dequantize_rows(tensor.data, tensor.tensor_type)
        if row in PERMUTED:
            weight = undo_permute(weight, int(read_field(reader, PERMUTED[row])))
        yield TENSOR_NAMES[row].format(n=layer[0] if layer else ""), weight


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Rebuild a ``gpt2`` vocabulary of the ``smollm`` pre-tokenizer: digits one by one, then byte-level BPE.

    Raises GgufError for any other kind: a wrong pre-tokenizer fails silently, as other tokens for the same text.
    """
    kind = (read_field(reader, "tokenizer.ggml.model"), read_field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufError(f"the GGUF file's tokenizer is {kind}; this reader knows only ('gpt2', 'smollm')")
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in read_field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = read_field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer
