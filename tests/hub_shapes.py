"""The tensors of Hugging Face's checkpoints by name, with their shapes, of each architecture: for fixtures.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def llama_shapes(c: dict[str, Any]) -> Shapes:
    hidden, inter = c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    attention: Shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        bias = c.get("attention_bias", False)
        shapes |= _linears(prefix + "self_attn.", attention, bias)
        if c["model_type"] == "qwen2":
            shapes |= {f"{prefix}self_attn.{part}_proj.bias": attention[f"{part}_proj"][:1] for part in "qkv"}
        if "n_routed_experts" in c:
            shapes |= _expert_layer(c, layer)
        else:
            shapes |= _linears(prefix + "mlp.", _mlp(hidden, inter), c.get("mlp_bias", False))
        shapes |= _layer_norms(prefix, hidden)
    return shapes | _tail(c)


def v2_shapes(c: dict[str, Any]) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], c["hidden_size"])}
    for layer in range(c["num_hidden_layers"]):
        shapes |= _latent_layer(c, layer)
    return shapes | _tail(c)


def v3_shapes(c: dict[str, Any], *, mtp: bool = True) -> Shapes:
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    shapes = v2_shapes(c)
    for layer in range(layers, layers + c["num_nextn_predict_layers"] if mtp else layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "embed_tokens.weight": (c["vocab_size"], hidden),
            prefix + "enorm.weight": (hidden,),
            prefix + "hnorm.weight": (hidden,),
            prefix + "eh_proj.weight": (hidden, 2 * hidden),
            **_latent_layer(c, layer),
            prefix + "shared_head.norm.weight": (hidden,),
            prefix + "shared_head.head.weight": (c["vocab_size"], hidden),
        }
    return shapes


def _latent_layer(c: dict[str, Any], layer: int) -> Shapes:
    """One decoder layer of DeepSeek-V2 or V3."""
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c["attention_bias"]
    q, rank = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), c["q_lora_rank"]
    latent, kv = c["kv_lora_rank"], heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    shapes: Shapes = {}
    if rank is None:
        shapes |= _linears(attention, {"q_proj": (q, hidden)}, False)
    else:
        shapes |= _linears(attention, {"q_a_proj": (rank, hidden)}, bias)
        shapes |= _linears(attention, {"q_a_layernorm": (rank,), "q_b_proj": (q, rank)}, False)
    shapes |= _linears(attention, {"kv_a_proj_with_mqa": (latent + c["qk_rope_head_dim"], hidden)}, bias)
    shapes |= _linears(attention, {"kv_a_layernorm": (latent,), "kv_b_proj": (kv, latent)}, False)
    shapes |= _linears(attention, {"o_proj": (hidden, heads * c["v_head_dim"])}, bias)
    return shapes | _expert_layer(c, layer) | _layer_norms(prefix, hidden)


def _expert_layer(c: dict[str, Any], layer: int) -> Shapes:
    """The MLP of one layer of a DeepSeek with experts: dense in the first layers, and where moe_layer_freq says so."""
    hidden, prefix = c["hidden_size"], f"model.layers.{layer}."
    if layer < c["first_k_dense_replace"] or layer % c["moe_layer_freq"]:
        return _linears(prefix + "mlp.", _mlp(hidden, c["intermediate_size"]), False)
    inter, experts = c["moe_intermediate_size"], c["n_routed_experts"]
    shapes: Shapes = {prefix + "mlp.gate.weight": (experts, hidden)}
    if c.get("topk_method") == "noaux_tc":
        shapes |= {prefix + "mlp.gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        shapes |= _linears(f"{prefix}mlp.experts.{expert}.", _mlp(hidden, inter), False)
    return shapes | _linears(prefix + "mlp.shared_experts.", _mlp(hidden, inter * c["n_shared_experts"]), False)


def _mlp(hidden: int, inter: int) -> Shapes:
    return {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}


def _linears(prefix: str, shapes: Shapes, bias: bool) -> Shapes:
    weights = {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
    return weights | ({f"{prefix}{name}.bias": shape[:1] for name, shape in shapes.items()} if bias else {})


def _layer_norms(prefix: str, hidden: int) -> Shapes:
    return {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}


def _tail(c: dict[str, Any]) -> Shapes:
    head = {} if c["tie_word_embeddings"] else {"lm_head.weight": (c["vocab_size"], c["hidden_size"])}
    return {"model.norm.weight": (c["hidden_size"],), **head}
