"""What TensorRT-LLM 1.2 asks of a checkpoint, stated again from its sources and apart from what writes one: the keys of
config.json, and every tensor of every rank with its type and shape.

Names of sizes as in its own code: t tensor parallel, E_l experts of a rank, mt ranks that share an expert's columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Shape = tuple[int, ...]
Expected = dict[str, tuple[str, Shape]]  # name -> (safetensors type, shape)

TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
# PretrainedConfig's own keys (models/modeling_utils.py); a class reads others as attributes.
KEYS = {
    "architecture",
    "dtype",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_act",
    "logits_dtype",
    "norm_epsilon",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_embedding_dim",
    "num_key_value_heads",
    "intermediate_size",
    "mapping",
    "quantization",
    "use_parallel_embedding",
    "embedding_sharding_dim",
    "head_size",
    "qk_layernorm",
    "runtime_defaults",
}
CLASS_KEYS = {
    "LlamaForCausalLM": {"mlp_bias", "attn_bias", "rotary_base", "rotary_scaling", "tie_word_embeddings"},
    "Qwen2ForCausalLM": {"qwen_type", "rotary_base", "rotary_scaling", "tie_word_embeddings"},
    "DeepseekForCausalLM": {"rotary_base", "rotary_scaling", "moe", "moe_intermediate_size"},
}
# Dataclasses that are made from these with **: another key is an error.
QUANTIZATION_KEYS = {
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "smoothquant_val",
    "clamp_val",
    "use_meta_recipe",
    "has_zero_point",
    "pre_quant_scale",
    "exclude_modules",
}
MAPPING_KEYS = {"world_size", "tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size", "gpus_per_node"}
MOE_KEYS = {
    "num_experts",
    "shared_expert_intermediate_size",
    "top_k",
    "normalization_mode",
    "sparse_mixer_epsilon",
    "tp_mode",
    "device_limited_n_group",
    "device_limited_topk_group",
    "device_limited_routed_scaling_factor",
}
ALGOS = {"W8A16", "W4A16_AWQ", "W4A8_AWQ", "W4A16_GPTQ", "W8A8_SQ_PER_CHANNEL", "FP8"}
MIXED_ALGOS = {"FP8", "W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"}
DEFAULT_EXCLUDES = ["*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding"]


@dataclass(frozen=True, slots=True)
class Contract:
    """A checkpoint's config.json and quant_cfg.json (None unless mixed), of known keys."""

    config: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]] | None

    def size(self, key: str) -> int:
        """Of `mapping`."""
        value: int = self.config["mapping"][key]
        return value

    @property
    def dtype(self) -> str:
        return TYPES[self.config["dtype"]]

    def list_layers(self, rank: int) -> range:
        """The decoder layers of a rank's pipeline stage."""
        count = self.config["num_hidden_layers"] // self.size("pp_size")
        stage = rank // self.size("tp_size")
        return range(stage * count, (stage + 1) * count)

    def is_routed(self, layer: int) -> bool:
        """Its DeepSeek model has experts in every layer but the model's first."""
        return "moe" in self.config and layer > 0

    def find_quantization(self, module: str) -> Mapping[str, Any]:
        """How the module of that name in a rank is quantized; nothing where it is not."""
        whole: Mapping[str, Any] = self.config["quantization"]
        if self.layers is not None:
            return next((row for name, row in self.layers.items() if fnmatchcase(module, name)), {})
        excludes = whole.get("exclude_modules")
        for pattern in DEFAULT_EXCLUDES if excludes is None else excludes:
            if fnmatchcase(module, pattern):
                return {}
        return whole if whole.get("quant_algo") else {}

    def list_tensors(self, rank: int) -> Expected:
        """What must be in a rank's file: any other tensor would be left out with a warning, a missing one is an error
        ("Required but not provided tensors")."""
        c, t = self.config, self.size("tp_size")
        hidden, rows = c["hidden_size"], -(-c["vocab_size"] // t)
        layers = self.list_layers(rank)
        expected: Expected = {}
        if layers.start == 0:
            share = rows if c["use_parallel_embedding"] else c["vocab_size"]
            expected["transformer.vocab_embedding.weight"] = (self.dtype, (share, hidden))
        for layer in layers:
            prefix = f"transformer.layers.{layer - layers.start}."
            for name, value in self._list_layer(layer, prefix):
                expected[prefix + name] = value
        if layers.stop == c["num_hidden_layers"]:
            expected["transformer.ln_f.weight"] = (self.dtype, (hidden,))
            expected["lm_head.weight"] = (self.dtype, (rows, hidden))
        return expected

    def _list_layer(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[str, Shape]]]:
        c, t = self.config, self.size("tp_size")
        hidden, head = c["hidden_size"], c["head_size"]
        kv = max(c["num_key_value_heads"], t)  # heads are repeated where there are fewer than ranks
        q = c["num_attention_heads"] * head // t
        bias = c.get("attn_bias", False)
        yield "input_layernorm.weight", (self.dtype, (hidden,))
        yield "post_layernorm.weight", (self.dtype, (hidden,))
        has_qkv_bias = bias or c.get("qwen_type") == "qwen2"
        yield from self._list_linear(prefix, "attention.qkv", q + 2 * kv * head // t, hidden, has_qkv_bias)
        yield from self._list_linear(prefix, "attention.dense", hidden, q, bias)
        if c["quantization"].get("kv_cache_quant_algo"):
            yield "attention.kv_cache_scaling_factor", ("F32", (1,))
        if self.is_routed(layer):
            yield from self._list_experts(prefix)
            return
        inner, bias = c["intermediate_size"] // t, c.get("mlp_bias", False)
        yield from self._list_linear(prefix, "mlp.fc", inner, hidden, bias)
        yield from self._list_linear(prefix, "mlp.gate", inner, hidden, bias)
        yield from self._list_linear(prefix, "mlp.proj", hidden, inner, bias)

    def _list_experts(self, prefix: str) -> Iterator[tuple[str, tuple[str, Shape]]]:
        moe, hidden, t = self.config["moe"], self.config["hidden_size"], self.size("tp_size")
        held = moe["num_experts"] // self.size("moe_ep_size")
        inner = self.config["moe_intermediate_size"] // self.size("moe_tp_size")
        yield "mlp.router.weight", ("F32", (moe["num_experts"], hidden))
        algo = self.find_quantization(f"{prefix}mlp").get("quant_algo")
        for name, shape in (("mlp.fc", (held, 2 * inner, hidden)), ("mlp.proj", (held, hidden, inner))):
            yield f"{name}.weight", ("F8_E4M3" if algo == "FP8" else self.dtype, shape)
            if algo == "FP8":
                yield f"{name}.weights_scaling_factor", ("F32", (held, 1))
                yield f"{name}.activation_scaling_factor", ("F32", (1,))
        shared = moe["shared_expert_intermediate_size"] // t
        yield from self._list_linear(prefix, "mlp.shared_expert.fc", 2 * shared, hidden, False)
        yield from self._list_linear(prefix, "mlp.shared_expert.proj", hidden, shared, False)

    def _list_linear(
        self, prefix: str, name: str, rows: int, columns: int, bias: bool
    ) -> Iterator[tuple[str, tuple[str, Shape]]]:
        row = self.find_quantization(prefix + name)
        for kind, value in list_parts(row, self.dtype, rows, columns).items():
            yield f"{name}.{kind}", value
        if bias:
            yield f"{name}.bias", (self.dtype, (rows,))


def list_parts(row: Mapping[str, Any], dtype: str, rows: int, columns: int) -> Expected:
    """The tensors of one linear [rows, columns] of a rank, under what follows "X.", by its quantization."""
    algo, group = row.get("quant_algo"), row.get("group_size", 128)
    one = ("F32", (1,))
    packed = {
        "weight": ("I8", (rows // 2, columns)),
        "weights_scaling_factor": ("F32", (rows, columns // group)),
        "prequant_scaling_factor": (dtype, (columns,)),
    }
    tables: dict[str | None, Expected] = {
        None: {"weight": (dtype, (rows, columns))},
        "W4A16_AWQ": packed,
        "W4A8_AWQ": packed | {"weights_scaling_factor_2": one, "activation_scaling_factor": one},
        "W4A16_GPTQ": {
            "weight": (dtype, (columns, rows // 4)),
            "weights_scaling_factor": (dtype, (columns // group, rows)),
            "zero": (dtype, (columns // group, rows)),
        },
        "W8A16": {"weight": ("I8", (columns, rows)), "per_channel_scale": (dtype, (rows,))},
        "FP8": {
            "weight": ("F8_E4M3", (rows, columns)),
            "weights_scaling_factor": one,
            "activation_scaling_factor": one,
        },
        "W8A8_SQ_PER_CHANNEL": {
            "weight": ("I8", (rows, columns)),
            "weights_scaling_factor": ("F32", (rows,)),
            "activation_scaling_factor": one,
            "prequant_scaling_factor": (dtype, (columns,)),
        },
    }
    return tables[algo]
