"""Llama: DeepSeek-LLM, DeepSeek-Coder, the R1-Distill-Llama models, SmolLM2.

Target names are those of TensorRT-LLM's LLaMAForCausalLM checkpoints. Beware: `mlp.fc` is gate_proj (the branch under
SiLU) and `mlp.gate` is up_proj. Examples: layer 3 of DeepSeek-LLM-7B (hidden 4096, 32 heads, intermediate 11008).
"""

from __future__ import annotations

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.layouts.rows import DENSE, LAYER, MODEL, Dimension, Row, linear, vector

LAYERS = "transformer.layers.{l}."
SOURCE_LAYERS = "model.layers.{l}."

# model.embed_tokens.weight [102400, 4096] -> transformer.vocab_embedding.weight
EMBEDDING: list[Row] = linear(
    "transformer.vocab_embedding", ["model.embed_tokens"], ["vocab"], "hidden", role="embedding", where=MODEL
)
HEAD: list[Row] = [
    # model.norm.weight [4096] -> transformer.ln_f.weight
    *vector("transformer.ln_f.weight", "model.norm.weight", "hidden", role="norm", where=MODEL),
    # lm_head.weight [102400, 4096] -> lm_head.weight; with tied embeddings neither side has it
    *linear("lm_head", ["lm_head"], ["vocab"], "hidden", role="head", where=MODEL, when="untied"),
]
INPUT_NORM: list[Row] = vector(
    # model.layers.3.input_layernorm.weight [4096] -> transformer.layers.3.input_layernorm.weight
    LAYERS + "input_layernorm.weight",
    SOURCE_LAYERS + "input_layernorm.weight",
    "hidden",
    role="norm",
    where=LAYER,
)
POST_NORM: list[Row] = vector(
    # model.layers.3.post_attention_layernorm.weight [4096] -> transformer.layers.3.post_layernorm.weight
    LAYERS + "post_layernorm.weight",
    SOURCE_LAYERS + "post_attention_layernorm.weight",
    "hidden",
    role="norm",
    where=LAYER,
)
ATTENTION: list[Row] = [
    # model.layers.3.self_attn.{q,k,v}_proj.weight, [4096, 4096] each (fewer rows in k and v where heads are grouped)
    #   -> transformer.layers.3.attention.qkv.weight [12288, 4096], rows q, then k, then v
    *linear(
        LAYERS + "attention.qkv",
        [SOURCE_LAYERS + f"self_attn.{part}_proj" for part in ("q", "k", "v")],
        ["q", "kv", "kv"],
        "hidden",
        role="attention_input",
        bias="qkv_bias",
    ),
    # model.layers.3.self_attn.o_proj.weight [4096, 4096] -> transformer.layers.3.attention.dense.weight
    *linear(
        LAYERS + "attention.dense",
        [SOURCE_LAYERS + "self_attn.o_proj"],
        ["hidden"],
        "q",
        role="attention_output",
        bias="attention_bias",
    ),
]


def mlp(target: str, source: str, width: str, *, role: str, where: str, bias: str = "") -> list[Row]:
    """A SwiGLU MLP of `width`: gate_proj -> fc, up_proj -> gate, down_proj -> proj."""
    return [
        # model.layers.3.mlp.gate_proj.weight [11008, 4096] -> transformer.layers.3.mlp.fc.weight
        *linear(f"{target}.fc", [f"{source}.gate_proj"], [width], "hidden", role=role, where=where, bias=bias),
        # model.layers.3.mlp.up_proj.weight [11008, 4096] -> transformer.layers.3.mlp.gate.weight
        *linear(f"{target}.gate", [f"{source}.up_proj"], [width], "hidden", role=role, where=where, bias=bias),
        # model.layers.3.mlp.down_proj.weight [4096, 11008] -> transformer.layers.3.mlp.proj.weight
        *linear(f"{target}.proj", [f"{source}.down_proj"], ["hidden"], width, role=role, where=where, bias=bias),
    ]


ROWS: tuple[Row, ...] = (
    *EMBEDDING,
    *INPUT_NORM,
    *ATTENTION,
    *POST_NORM,
    *mlp(LAYERS + "mlp", SOURCE_LAYERS + "mlp", "intermediate", role="mlp", where=DENSE, bias="mlp_bias"),
    *HEAD,
)

# Tensors that old checkpoints carry and nothing reads: constants that follow from config.json.
UNUSED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


def list_dimensions(a: Architecture) -> dict[str, Dimension]:
    head = "head_dim" if a.head_dim * a.num_heads != a.hidden_size else "head_dim (hidden_size / num_attention_heads)"
    return {
        "vocab": Dimension(a.vocab_size, "vocab_size"),
        "hidden": Dimension(a.hidden_size, "hidden_size"),
        "intermediate": Dimension(a.intermediate_size, "intermediate_size"),
        "q": Dimension(a.num_heads * a.head_dim, f"num_attention_heads * {head}"),
        "kv": Dimension(a.num_kv_heads * a.head_dim, f"num_key_value_heads * {head}"),
    }
