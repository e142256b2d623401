"""config.json of a TensorRT-LLM 1.2 checkpoint: PretrainedConfig's keys, and those of the model's own class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.rope_config import ORIGINAL
from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture, Rope
    from pipeline.engine.tensorrt_llm.rank_quantization import RankQuantization
    from pipeline.sharding.ranks import Parallel

NO_NORMALIZATION = 0  # MoeConfig.ExpertScaleNormalizationMode.NONE: plain softmax weights


def make_config(
    architecture: Architecture, dtype: str, parallel: Parallel, quantization: RankQuantization
) -> dict[str, Any]:
    """Raises CompatibilityError for a RoPE that TensorRT-LLM would compute otherwise."""
    a = architecture
    return {
        "architecture": a.name,
        "dtype": dtype,
        "logits_dtype": "float32",
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "hidden_size": a.hidden_size,
        "head_size": a.head_dim,
        "intermediate_size": a.intermediate_size,
        "vocab_size": a.vocab_size,
        # Its RoPE table's length. YaRN's stated one may be the unscaled; a dynamic RoPE counts from the stated one.
        "max_position_embeddings": a.max_position_embeddings if a.rope.kind == "dynamic" else a.context_limit,
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "silu",
        "norm_epsilon": a.norm_eps,
        "qk_layernorm": False,
        "rotary_base": a.rope.theta,
        "rotary_scaling": _describe_rope(a.rope, a.max_position_embeddings),
        "use_parallel_embedding": parallel.tensor > 1,
        "embedding_sharding_dim": 0,
        "mapping": {
            "world_size": parallel.world,
            "tp_size": parallel.tensor,
            "pp_size": parallel.pipeline,
            "cp_size": 1,
            "moe_tp_size": parallel.moe_tensor,
            "moe_ep_size": parallel.expert,
        },
        "quantization": dict(quantization.config),
        **CLASSES[a.name](a),
    }


def _describe_llama(a: Architecture) -> dict[str, Any]:
    return {"attn_bias": a.attention_bias, "mlp_bias": a.mlp_bias}


def _describe_qwen2(a: Architecture) -> dict[str, Any]:
    return {"qwen_type": "qwen2"}


def _describe_deepseek(a: Architecture) -> dict[str, Any]:
    if a.experts is None:  # refused before
        return {}
    return {
        "hidden_act": "swiglu",
        "moe_intermediate_size": a.experts.intermediate_size,
        "moe": {
            "num_experts": a.experts.num_routed,
            "shared_expert_intermediate_size": a.experts.num_shared * a.experts.intermediate_size,
            "top_k": a.experts.top_k,
            "normalization_mode": NO_NORMALIZATION,
        },
    }


# HF class -> its own keys.
CLASSES: dict[str, Callable[[Architecture], dict[str, Any]]] = {
    "LlamaForCausalLM": _describe_llama,
    "Qwen2ForCausalLM": _describe_qwen2,
    "DeepseekForCausalLM": _describe_deepseek,
}


def _describe_rope(rope: Rope, max_position_embeddings: int) -> dict[str, Any] | None:
    """`rotary_scaling`: it reads `type`, and what it leaves open has defaults other than transformers'."""
    if rope.kind == "default":
        return None
    if "attention_factor" in rope.scaling:
        raise CompatibilityError(
            "rope_scaling.attention_factor: TensorRT-LLM computes that factor from mscale and reads no other",
            hint="use backend tensorrt_rtx or tensorrt",
        )
    scaling: dict[str, Any] = {"type": rope.kind, **rope.scaling}
    if rope.kind == "yarn":
        scaling = {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            ORIGINAL: max_position_embeddings,
            **scaling,
        }
    if ORIGINAL in scaling:
        scaling[ORIGINAL] = int(scaling[ORIGINAL])
    return scaling
