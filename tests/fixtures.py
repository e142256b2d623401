"""Small random checkpoints as the hub lays them out: what every test converts, quantizes, proves and builds.

Written with the `safetensors` library and names spelled out here, so that they share nothing with the code under test.
`config.json` holds the hub's own keys in the hub's own spelling (`rope_scaling`, `torch_dtype`, `auto_map`, …), never
what transformers 5 writes back. Weights are three times the usual initialization, norms 1 + 0.1 N(0, 1): logits vary
enough that a wrong order, a dropped scale or a transposed expert shows.

    path = llama(tmp_path / "m", rope="yarn", num_hidden_layers=1)
    path = deepseek_v2(tmp_path / "m", q_lora_rank=None, dtype="float16")
    path = deepseek_v3(tmp_path / "m", fp8=True)      # as DeepSeek ships it: 128 x 128 blocks, ragged ones included

All (qwen2 and deepseek_moe, DeepSeek's first with experts, too) take any key of config.json as a keyword, and:
    rope         a key of LLAMA_ROPES (llama, deepseek_moe) or V2_ROPES (an explicit rope_scaling=… wins)
    dtype        float32, float16 or bfloat16
    shards       number of .safetensors files; 1 leaves out the index
    seed
    tokenizer    also write a byte-level tokenizer with a chat template (256 bytes, ids 2..257; bos 0, eos 1)
    edit         called with {name: tensor} before writing, to damage something
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.hub_shapes import Shapes, llama_shapes, v2_shapes, v3_shapes

Tensors = dict[str, torch.Tensor]

LLAMA_ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"factor": 4.0, "type": "linear"},  # as DeepSeek-Coder has it
    "dynamic": {"factor": 2.0, "type": "dynamic"},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"},
    "llama3": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
}
V2_ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    # As DeepSeek-V2 has it, with a short original context so that tests pass beyond it cheaply. mscale differs from
    # mscale_all_dim (equal on the hub) so that the attention factor of the tables is not just 1.
    "yarn": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
}

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.1",
    "use_cache": True,
    "vocab_size": 512,
}
V2_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    # Custom code that must never run: the file does not even exist.
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 256,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 64,
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
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
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
    "v_head_dim": 32,
    "vocab_size": 512,
}


# huggingface.co/deepseek-ai/deepseek-moe-16b-base, cut down: Llama's attention, experts as V2 has them.
MOE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "model_type": "deepseek",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": 512,
}
# huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B, cut down. The class has biases on q, k and v without a key
# for them; sliding_window stands there and is not used.
QWEN2_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 512,
}
# huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Llama-8B: the keys that set it apart from LLAMA_CONFIG, sizes aside.
R1_DISTILL_LLAMA: dict[str, Any] = {
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "transformers_version": "4.43.0.dev0",
}
# huggingface.co/deepseek-ai/DeepSeek-V2-Lite, with fewer layers, a small vocabulary, hidden size and experts. The dense
# width is its own: 10944 = 64 * 171.
V2_LITE_SHAPES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
# huggingface.co/deepseek-ai/DeepSeek-V3 (and R1, V3.1), cut down.
V3_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 256,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": 512,
}
FP8_CONFIG: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def llama(path: Path, *, rope: str = "linear", dtype: str = "bfloat16", **options: Any) -> Path:
    """Writes a GQA Llama and returns its folder."""
    files, overrides = _split(options)
    config = {**LLAMA_CONFIG, "rope_scaling": _copy(LLAMA_ROPES[rope]), "torch_dtype": dtype, **overrides}
    return _write(path, config, llama_shapes(config), dtype, **files)


def deepseek_moe(path: Path, *, rope: str = "default", dtype: str = "bfloat16", **options: Any) -> Path:
    """Writes a DeepSeek-MoE (the first, `DeepseekForCausalLM`): one dense layer, then shared and routed experts, and
    returns its folder."""
    files, overrides = _split(options)
    config = {**MOE_CONFIG, "rope_scaling": _copy(LLAMA_ROPES[rope]), "torch_dtype": dtype, **overrides}
    return _write(path, config, llama_shapes(config), dtype, **files)


def deepseek_v2(path: Path, *, rope: str = "yarn", dtype: str = "bfloat16", **options: Any) -> Path:
    """Writes an MLA DeepSeek-V2, one dense layer, then shared and routed experts, and returns its folder."""
    files, overrides = _split(options)
    config = {**V2_CONFIG, "rope_scaling": _copy(V2_ROPES[rope]), "torch_dtype": dtype, **overrides}
    return _write(path, config, v2_shapes(config), dtype, **files)


def qwen2(path: Path, *, dtype: str = "bfloat16", **options: Any) -> Path:
    """Writes a GQA Qwen2, biased in q, k and v, and returns its folder."""
    files, overrides = _split(options)
    config = {**QWEN2_CONFIG, "torch_dtype": dtype, **overrides}
    return _write(path, config, llama_shapes(config), dtype, **files)


def deepseek_v3(
    path: Path, *, rope: str = "yarn", dtype: str = "bfloat16", fp8: bool = False, mtp: bool = True, **options: Any
) -> Path:
    """Writes a DeepSeek-V3 with its MTP layer and returns its folder.

    fp8: linears in F8_E4M3 with scales of 128 x 128 blocks, as DeepSeek has them. mtp=False: config.json speaks of the
    layer, but its tensors are not there, as in many copies of the model.
    """
    files, overrides = _split(options)
    config = {**V3_CONFIG, "rope_scaling": _copy(V2_ROPES[rope]), "torch_dtype": dtype, **overrides}
    if fp8:
        config["quantization_config"] = _copy(FP8_CONFIG)
    edit = files.pop("edit", None)

    def finish(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            tensors[name] = tensors[name].float()
        if fp8:
            quantize_fp8(tensors)
        if edit is not None:
            edit(tensors)

    return _write(path, config, v3_shapes(config, mtp=mtp), dtype, edit=finish, **files)


# What DeepSeek leaves in bfloat16, beside everything that is no matrix.
NOT_FP8 = ("embed_tokens", "lm_head", "shared_head", "mlp.gate.", "eh_proj")


def quantize_fp8(tensors: Tensors) -> None:
    """Every linear to F8_E4M3 by blocks of 128 x 128, the last ones of a row or column smaller: X.weight, and
    X.weight_scale_inv, which a weight is multiplied by to get it back."""
    for name in [name for name, t in tensors.items() if t.ndim == 2 and not any(part in name for part in NOT_FP8)]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                scales[i, j] = block.abs().max() / 448
                stored[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = block / scales[i, j]
        place = list(tensors).index(name)
        items = list(tensors.items())
        items[place : place + 1] = [(name, stored), (f"{name}_scale_inv", scales)]
        tensors.clear()
        tensors.update(items)


def random_tensors(shapes: Shapes, dtype: str, seed: int) -> Tensors:
    """Seeded weights of the given shapes, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.1 * noise if "norm" in name else 0.06 * noise
        return value.to(getattr(torch, dtype))

    return {name: draw(name, shape) for name, shape in shapes.items()}


def write_shards(path: Path, tensors: Tensors, shards: int) -> None:
    """Cuts the tensors, in order, into files of about equal count, with the hub's names and index."""
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05}-of-{shards:06}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges: ids 2..257 are the bytes, 0 begins a text, 1 ends it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # noqa: RUF001 (DeepSeek's own spelling)
    vocabulary = {bos: 0, eos: 1} | {c: 2 + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([bos, eos])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "bos_token": bos,
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
        "eos_token": eos,
        "model_max_length": 256,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _write(
    path: Path,
    config: dict[str, Any],
    shapes: Shapes,
    dtype: str,
    *,
    shards: int = 3,
    seed: int = 0,
    tokenizer: bool = False,
    edit: Callable[[Tensors], None] | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(shapes, dtype, seed)
    if edit is not None:
        edit(tensors)
    write_shards(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer:
        write_tokenizer(path)
    return path


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the files, and the rest: keys of config.json."""
    files: dict[str, Any] = {key: options.pop(key) for key in ("shards", "seed", "tokenizer", "edit") if key in options}
    return files, options


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))  # transformers writes into the mapping it is given
