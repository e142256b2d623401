"""The hub's names as llama.cpp's, and which rows it wants in another order.

llama.cpp's RoPE of `llama` and `deepseek` turns pairs of neighbours, the hub's Llama the two halves of a head: the rows
of q and k change places. DeepSeek-V2 and V3 turn pairs on the hub too, and Qwen2 halves in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture

# The class of the hub -> general.architecture, which prefixes the keys.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
}
OUTER: Mapping[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# One tensor of a layer for all experts, the expert first.
STACKS: Mapping[str, str] = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
ROUTER_BIAS = ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")
KEYS_VALUES = "self_attn.kv_b_proj"  # becomes attn_k_b, each head transposed, and attn_v_b
PAIRED = ("llama", "deepseek")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(.+)\.weight")


def name_architecture(architecture: Architecture) -> str:
    """Raises CompatibilityError for what llama.cpp has no place for."""
    name = ARCHITECTURES.get(architecture.name)
    if name is None:
        raise CompatibilityError(
            f"GGUF: there is no export of {architecture.name}", hint=f"of {', '.join(ARCHITECTURES)}"
        )
    if name == "deepseek2" and not architecture.rope.interleaved:
        raise CompatibilityError(
            "GGUF: rope_interleave is false; llama.cpp's deepseek2 turns pairs", hint="choose --format hf"
        )
    if name == "deepseek2" and architecture.attention_bias:
        raise CompatibilityError(
            "GGUF: attention_bias is true; llama.cpp's deepseek2 has no biases", hint="choose --format hf"
        )
    return name


def name_tensor(source: str) -> str:
    """ "model.layers.3.mlp.gate.weight" → "blk.3.ffn_gate_inp.weight"; a routed expert's is its stack's."""
    module, _, kind = source.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{kind}"
    found = _LAYER.fullmatch(source)
    if found is None:
        raise KeyError(source)
    prefix, inner = f"blk.{found[1]}.", found[2]
    if inner == ROUTER_BIAS[0]:
        return prefix + ROUTER_BIAS[1]
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        return f"{prefix}{STACKS[expert[1]]}.weight"
    return f"{prefix}{LAYER[inner.rpartition('.')[0]]}.{kind}"


def order_rows(architecture: Architecture, source: str, rows: int) -> npt.NDArray[np.intp] | None:
    """Which of the hub's rows comes first, second and so on; None where they stay in order."""
    name, (module, _, _) = ARCHITECTURES[architecture.name], source.rpartition(".")
    if (
        name not in PAIRED
        or architecture.rope.interleaved
        or not module.endswith(("self_attn.q_proj", "self_attn.k_proj"))
    ):
        return None
    heads = rows // architecture.head_dim
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
