"""The two checkpoints' configurations as the hub writes them, as data.

Compare deepseek-ai/DeepSeek-V2 and deepseek-ai/deepseek-coder-6.7b-base. The keys that ``transformers`` 5 would
rename (``rope_scaling``, ``rope_theta``, ``torch_dtype``) or drop (``scoring_func``, ``moe_layer_freq``, ``ep_size``)
keep their hub form: readers of real checkpoints must be tried on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Json = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One checkpoint: its folder's name, its config.json, how it is trained and split into shards."""

    name: str
    title: str
    config: Json
    learning_rate: float
    batch: int = 16
    seed: int = 20_260
    # A training-only term (DeepSeek-V2, section 2.2.3): without it a tiny router starves half of its experts.
    balance: float = 0.0
    shard_bytes: int = 4_500_000

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer and of the embedding."""
        return int(str(self.config["vocab_size"]))

    @property
    def bos(self) -> int:
        """Id of the token that begins a sequence."""
        return int(str(self.config["bos_token_id"]))

    @property
    def context(self) -> int:
        """``max_position_embeddings``, in tokens."""
        return int(str(self.config["max_position_embeddings"]))


DEEPSEEK_V2 = Recipe(
    name="deepseek-v2-tiny",
    title="DeepSeek-V2 (MLA, routed experts, YaRN)",
    learning_rate=3e-3,
    batch=8,
    balance=0.01,
    config={
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.01,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 128,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 1024,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.3",
        "use_cache": True,
        "v_head_dim": 64,
        "vocab_size": 2048,
    },
)

DEEPSEEK_CODER = Recipe(
    name="deepseek-coder-tiny",
    title="DeepSeek-Coder (Llama architecture, grouped-query attention, linear RoPE scaling)",
    learning_rate=3e-3,
    shard_bytes=5_500_000,
    config={
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 768,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.1",
        "use_cache": True,
        "vocab_size": 4096,
    },
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (DEEPSEEK_CODER, DEEPSEEK_V2)}
