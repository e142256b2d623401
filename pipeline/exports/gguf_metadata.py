"""The keys by which llama.cpp knows an architecture, and RoPE's factors, from the model alone.

YaRN: llama.cpp multiplies cos and sin by 1 + 0.1 ln(factor), times `attn_factor`. In `deepseek2` what the softmax is
scaled by follows from `yarn_log_multiplier` = 0.1·mscale_all_dim, and the factor of cos and sin from mscale being the
same number, as it is in every DeepSeek on the hub.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from pipeline.checkpoint.architecture import Architecture, Experts, LatentAttention

ROPE_FACTORS = "rope_freqs.weight"
GATING = {"softmax": 1, "sigmoid": 2}  # gguf.ExpertGatingFuncType
GROUPS_NOTE = (
    "llama.cpp chooses groups of experts by their best two, this model by their best: some tokens take other experts"
)
NO_RANK_NOTE = "llama.cpp reads a model without q_lora_rank only with 27 layers, as V2-Lite has"


def add_architecture(writer: GGUFWriter, a: Architecture) -> list[str]:
    """Writes the keys; returns what a user must know. Raises CompatibilityError for what they cannot say."""
    writer.add_context_length(a.context_limit)
    writer.add_embedding_length(a.hidden_size)
    writer.add_block_count(a.num_layers)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.num_heads)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    writer.add_rope_freq_base(a.rope.theta)
    writer.add_vocab_size(a.vocab_size)
    if a.latent is None:
        writer.add_head_count_kv(a.num_kv_heads)
        writer.add_key_length(a.head_dim)
        writer.add_value_length(a.head_dim)
        writer.add_rope_dimension_count(a.head_dim)
    else:
        _add_latent(writer, a.latent)
    notes = _add_experts(writer, a, a.experts) if a.experts is not None else []
    _ROPES[a.rope.kind](writer, a)
    if a.latent is not None and a.latent.q_lora_rank is None and a.num_layers != 27:
        notes.append(NO_RANK_NOTE)
    return notes


def rope_factors(a: Architecture) -> npt.NDArray[np.float32] | None:
    """llama3's divisors of the frequencies [head_dim/2] (transformers' _compute_llama3_parameters); None for others."""
    if a.rope.kind != "llama3":
        return None
    low, high, factor, original = (
        a.rope.scaling[key]
        for key in ("low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings")
    )
    frequencies = a.rope.theta ** (-np.arange(0, a.head_dim, 2, dtype=np.float64) / a.head_dim)
    turns = original * frequencies / (2 * math.pi)  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _add_latent(writer: GGUFWriter, latent: LatentAttention) -> None:
    """Absorbed attention: one head of keys and values, the latent; the sizes without that are the `_mla` keys."""
    writer.add_head_count_kv(1)
    writer.add_key_length(latent.latent_dim)
    writer.add_value_length(latent.kv_lora_rank)
    writer.add_key_length_mla(latent.qk_head_dim)
    writer.add_value_length_mla(latent.v_head_dim)
    writer.add_rope_dimension_count(latent.qk_rope_head_dim)
    writer.add_kv_lora_rank(latent.kv_lora_rank)
    if latent.q_lora_rank is not None:
        writer.add_q_lora_rank(latent.q_lora_rank)


def _add_experts(writer: GGUFWriter, a: Architecture, experts: Experts) -> list[str]:
    if experts.layer_freq != 1:
        raise CompatibilityError(
            f"GGUF: moe_layer_freq is {experts.layer_freq}; llama.cpp knows dense layers before the routed ones only",
            hint="choose --format hf",
        )
    if a.latent is None and (experts.norm_topk_prob or experts.routed_scaling_factor != 1):
        raise CompatibilityError(
            "GGUF: llama.cpp's deepseek neither normalizes nor scales the experts' weights; norm_topk_prob and "
            f"routed_scaling_factor are {experts.norm_topk_prob} and {experts.routed_scaling_factor:g}",
            hint="choose --format hf",
        )
    writer.add_leading_dense_block_count(experts.first_dense_layers)
    writer.add_expert_count(experts.num_routed)
    writer.add_expert_used_count(experts.top_k)
    writer.add_expert_shared_count(experts.num_shared)
    writer.add_expert_feed_forward_length(experts.intermediate_size)
    writer.add_expert_weights_scale(experts.routed_scaling_factor)
    writer.add_expert_weights_norm(experts.norm_topk_prob)
    writer.add_uint32(f"{writer.arch}.expert_gating_func", GATING[experts.scoring_func])
    if experts.topk_method == "greedy" or experts.n_group == 1:
        return []
    writer.add_expert_group_count(experts.n_group)
    writer.add_expert_group_used_count(experts.topk_group)
    return [] if experts.topk_method == "noaux_tc" else [GROUPS_NOTE]


def _add_default(writer: GGUFWriter, a: Architecture) -> None:
    """Nothing: of dynamic scaling too, which changes nothing within the context that is stated."""


def _add_linear(writer: GGUFWriter, a: Architecture) -> None:
    from gguf import RopeScalingType

    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(a.rope.scaling["factor"])


def _add_llama3(writer: GGUFWriter, a: Architecture) -> None:
    """A tensor of factors, which only `llama` reads."""
    if writer.arch != "llama":
        raise CompatibilityError(
            f"GGUF: llama.cpp's {writer.arch} has no RoPE scaling of type llama3", hint="choose --format hf"
        )


def _add_yarn(writer: GGUFWriter, a: Architecture) -> None:
    from gguf import RopeScalingType

    rope, factor = a.rope, a.rope.scaling["factor"]
    mscale, all_dim = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    original = rope.get("original_max_position_embeddings", a.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(int(original))
    for key, default, add in (
        ("beta_fast", 32.0, writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", 1.0, writer.add_rope_scaling_yarn_beta_slow),
    ):
        value = rope.get(key, default) or default
        if value != default:
            add(value)
    if a.latent is None:
        stated = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
        stated = rope.get("attention_factor", stated)
        if stated != _mscale(factor):
            writer.add_rope_scaling_attn_factors(stated / _mscale(factor))
    elif mscale != all_dim or not all_dim or "attention_factor" in rope.scaling:
        raise CompatibilityError(
            f"GGUF: llama.cpp's deepseek2 has one number for YaRN's mscale and mscale_all_dim; here they are "
            f"{mscale:g} and {all_dim:g}",
            hint="choose --format hf; DeepSeek's own models have the same for both",
        )
    else:
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_ROPES = {
    "default": _add_default,
    "dynamic": _add_default,
    "linear": _add_linear,
    "llama3": _add_llama3,
    "yarn": _add_yarn,
}
