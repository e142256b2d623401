"""DeepSeek-V2 and V2-Lite: multi-head latent attention; leading dense layers, then shared and routed experts.

Latent projections keep their names; the rest is named as for Llama. No weight is permuted: the rotary dimensions stay
in the hub's interleaved order. Examples: layer 3 of DeepSeek-V2 (hidden 5120, 128 heads of 128 + 64, q_lora_rank 1536,
kv_lora_rank 512, 160 experts of 1536, 2 shared); V2-Lite has q_proj in place of q_a_proj and q_b_proj.
"""

from __future__ import annotations

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.layouts import deepseek, llama
from pipeline.checkpoint.layouts.llama import LAYERS, SOURCE_LAYERS
from pipeline.checkpoint.layouts.rows import DENSE, LAYER, Dimension, Row, linear, vector
from pipeline.errors import CheckpointError


def _linear(name: str, rows: str, columns: str, *, role: str, when: str = "", bias: str = "") -> list[Row]:
    return linear(
        f"{LAYERS}attention.{name}",
        [f"{SOURCE_LAYERS}self_attn.{name}"],
        [rows],
        columns,
        role=role,
        when=when,
        bias=bias,
    )


def _norm(name: str, rows: str, *, when: str = "") -> list[Row]:
    target, source = f"{LAYERS}attention.{name}.weight", f"{SOURCE_LAYERS}self_attn.{name}.weight"
    return vector(target, source, rows, role="norm", where=LAYER, when=when)


ATTENTION: list[Row] = [
    # model.layers.3.self_attn.q_proj.weight [3072, 2048] (V2-Lite) -> transformer.layers.3.attention.q_proj.weight
    *_linear("q_proj", "q", "hidden", role="attention_input", when="q_full"),
    # model.layers.3.self_attn.q_a_proj.weight [1536, 5120] -> transformer.layers.3.attention.q_a_proj.weight
    *_linear("q_a_proj", "q_lora", "hidden", role="attention_input", when="q_lora", bias="q_lora_bias"),
    # model.layers.3.self_attn.q_a_layernorm.weight [1536] -> transformer.layers.3.attention.q_a_layernorm.weight
    *_norm("q_a_layernorm", "q_lora", when="q_lora"),
    # model.layers.3.self_attn.q_b_proj.weight [24576, 1536] -> transformer.layers.3.attention.q_b_proj.weight
    *_linear("q_b_proj", "q", "q_lora", role="attention_input", when="q_lora"),
    # model.layers.3.self_attn.kv_a_proj_with_mqa.weight [576, 5120]
    #   -> transformer.layers.3.attention.kv_a_proj_with_mqa.weight, rows latent, then rotary key
    *_linear("kv_a_proj_with_mqa", "latent", "hidden", role="attention_latent", bias="attention_bias"),
    # model.layers.3.self_attn.kv_a_layernorm.weight [512] -> transformer.layers.3.attention.kv_a_layernorm.weight
    *_norm("kv_a_layernorm", "kv_lora"),
    # model.layers.3.self_attn.kv_b_proj.weight [32768, 512]
    #   -> transformer.layers.3.attention.kv_b_proj.weight, rows per head: key (nope), then value
    *_linear("kv_b_proj", "kv", "kv_lora", role="attention_latent"),
    # model.layers.3.self_attn.o_proj.weight [5120, 16384] -> transformer.layers.3.attention.dense.weight
    *linear(
        LAYERS + "attention.dense",
        [SOURCE_LAYERS + "self_attn.o_proj"],
        ["hidden"],
        "v",
        role="attention_output",
        bias="attention_bias",
    ),
]
ROWS: tuple[Row, ...] = (
    *llama.EMBEDDING,
    *llama.INPUT_NORM,
    *ATTENTION,
    *llama.POST_NORM,
    *llama.mlp(LAYERS + "mlp", SOURCE_LAYERS + "mlp", "intermediate", role="mlp", where=DENSE, bias="mlp_bias"),
    *deepseek.ROUTED_MLP,
    *llama.HEAD,
)
UNUSED = llama.UNUSED


def list_dimensions(a: Architecture) -> dict[str, Dimension]:
    if a.latent is None:
        raise CheckpointError(f"{a.name} without latent attention has no layout")
    heads, latent = a.num_heads, a.latent
    dimensions = {
        "vocab": Dimension(a.vocab_size, "vocab_size"),
        "hidden": Dimension(a.hidden_size, "hidden_size"),
        "hidden_twice": Dimension(2 * a.hidden_size, "2 * hidden_size"),
        "intermediate": Dimension(a.intermediate_size, "intermediate_size"),
        "q": Dimension(heads * latent.qk_head_dim, "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"),
        "kv_lora": Dimension(latent.kv_lora_rank, "kv_lora_rank"),
        "latent": Dimension(latent.latent_dim, "kv_lora_rank + qk_rope_head_dim"),
        "kv": Dimension(
            heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
        ),
        "v": Dimension(heads * latent.v_head_dim, "num_attention_heads * v_head_dim"),
    }
    if latent.q_lora_rank is not None:
        dimensions["q_lora"] = Dimension(latent.q_lora_rank, "q_lora_rank")
    return dimensions | deepseek.list_expert_dimensions(a)
