"""A hub folder as one `transformers` model in float32: what layers, networks and exports are held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

EAGER = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}


def load_whole(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "deepseek":
        return _load_deepseek_moe(path, config)
    return AutoModelForCausalLM.from_pretrained(path, **EAGER).eval()


def _load_deepseek_moe(path: Path, config: dict[str, Any]) -> Any:
    """transformers has no DeepSeek-MoE, but both of its halves: Llama, and the MLP of DeepSeek-V2 where it routes
    greedily (arXiv 2401.06066 §3; 2405.04434 §2.2 takes it over). Another pair of classes than the one that
    pipeline/checkpoint/reference.py runs."""
    from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    left_out = ("architectures", "auto_map", "model_type", "torch_dtype", "quantization_config")
    values = {key: value for key, value in config.items() if key not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**values, attn_implementation="eager")).float()
    routed_config = DeepseekV2Config(**values, topk_method="greedy")
    routed_config._experts_implementation = "eager"
    tensors = {name: t.float() for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    experts = config["n_routed_experts"]
    for layer in model.model.layers:
        prefix = f"model.layers.{layer.self_attn.layer_idx}.mlp."
        if f"{prefix}gate.weight" in tensors:
            layer.mlp = DeepseekV2Moe(routed_config)
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}experts.{e}.{part}_proj.weight") for e in range(experts)])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{prefix}experts.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}experts.down_proj": down}
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.eval()
