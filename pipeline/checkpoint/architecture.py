"""What a decoder looks like, read once from a Hugging Face `config.json` and validated: the only reader of its keys.

Reads the hub's own keys (`rope_scaling`, `rope_theta`, `torch_dtype`) as well as those that transformers 5 writes
(`rope_parameters`, `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint.config_values import ConfigValues
from pipeline.checkpoint.experts_config import Experts, parse_experts
from pipeline.checkpoint.rope_config import Rope, parse_rope
from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.errors import CheckpointError

__all__ = ["ARCHITECTURES", "Architecture", "Experts", "LatentAttention", "Rope", "parse_architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): ranks and head sizes."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one row of the cache: the compressed KV and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer. Sizes count elements; `name` is the HF class (LlamaForCausalLM, …)."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qkv_bias: bool  # of q, k and v alone in Qwen2; part of attention_bias elsewhere
    mlp_bias: bool
    dtype: str  # torch spelling: float16, bfloat16, float32
    rope: Rope
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mtp_layers: int = 0  # multi-token prediction layers after the decoder's: stored, not computed

    def is_routed(self, layer: int) -> bool:
        """Whether this decoder layer's MLP is routed."""
        e = self.experts
        return e is not None and layer >= e.first_dense_layers and layer % e.layer_freq == 0

    @property
    def context_limit(self) -> int:
        """The longest sequence that the model and a static RoPE table can hold.

        `max_position_embeddings` is the scaled limit already: DeepSeek-Coder states 16384 for 4096 x 4 (linear),
        DeepSeek-V2 163840 for 4096 x 40 (yarn), Llama 3.1 131072. Models of Qwen's kind state the unscaled one beside
        a yarn block, so yarn takes the larger. With `dynamic` it is the unscaled limit, up to which frequencies are
        constant.
        """
        stated = self.max_position_embeddings
        original = int(self.rope.get("original_max_position_embeddings", 0))
        if self.rope.kind == "yarn":
            return max(stated, int(original * self.rope.get("factor", 1.0)))
        if self.rope.kind == "dynamic" and original:
            return min(stated, original)
        return stated

    @property
    def cache_widths(self) -> tuple[tuple[int, int], ...]:
        """The KV pools of one layer as (heads, width) each: K and V, or the one latent."""
        if self.latent is not None:
            return ((1, self.latent.latent_dim),)
        return ((self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a HF class settles without config.json's help.

    routing: the topk_method and scoring_func that the class can have; the first of each is what an absent key means.
    required: keys whose defaults differ between implementations. fixed: keys that may be absent, or have this value.
    """

    latent: bool = False
    routing: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    interleaved: bool = False  # rotates even/odd pairs, not halves
    qkv_bias: bool = False
    mtp: bool = False
    required: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)


# HF class -> what it settles. The layers' weights are in layouts/, what they compute in pipeline/network/decoder.py.
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        fixed={"use_sliding_window": False, "use_mrope": False, "attention_bias": False, "mlp_bias": False},
    ),
    # DeepSeek-MoE-16B. Its own code scales no routed sum and has no groups; V2's keys for them would be left unread.
    "DeepseekForCausalLM": Family(
        routing=(("greedy",), ("softmax",)),
        fixed={"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "mlp_bias": False},
    ),
    "DeepseekV2ForCausalLM": Family(
        latent=True, routing=(("greedy", "group_limited_greedy"), ("softmax",)), interleaved=True
    ),
    "DeepseekV3ForCausalLM": Family(
        latent=True,
        routing=(("noaux_tc",), ("sigmoid",)),
        interleaved=True,
        mtp=True,
        required=("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
    ),
}
# Why a fixed key has the value that it has, where config.json has another.
REASONS = {
    "use_sliding_window": "some layers would attend to the last sliding_window tokens alone, and the networks of all "
    "layers attend to all",
}
MAX_LAYERS = 1000
MAX_MTP_LAYERS = 16


def parse_architecture(config: Mapping[str, Any], origin: str = "config.json") -> Architecture:
    """Reads a HF `config.json` (already parsed). `origin` is the file's name for messages.

    Raises CheckpointError for a missing, mistyped, absurd or contradicting key, and for what is not supported.
    """
    c = ConfigValues(config, origin)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise c.fail("architectures", f"must list one class, not {names!r}")
    name = names[0]
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{origin}: architecture {name} is not supported",
            hint=f"supported: {', '.join(ARCHITECTURES)}",
        )
    family = ARCHITECTURES[name]
    _check_keys(c, family)
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if hidden % heads:  # transformers refuses it too, even where head_dim is given
        raise c.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    latent = _parse_latent(c) if family.latent else None
    head_dim = latent.qk_head_dim if latent else c.integer("head_dim", hidden // heads)
    rotary = ("qk_rope_head_dim", latent.qk_rope_head_dim) if latent else ("head_dim", head_dim)
    if rotary[1] % 2:
        raise c.fail(rotary[0], f"is {rotary[1]}; rotary embedding turns pairs, so it must be even")
    kv_heads = c.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise c.fail("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    c.choice("hidden_act", "silu", ("silu",))
    layers = c.integer("num_hidden_layers", maximum=MAX_LAYERS)
    attention_bias = c.flag("attention_bias", False)
    return Architecture(
        name=name,
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=c.integer("vocab_size"),
        max_position_embeddings=c.integer("max_position_embeddings", maximum=2**31 - 1),
        norm_eps=c.number("rms_norm_eps", 1e-6, minimum=0.0),
        tie_word_embeddings=c.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        qkv_bias=attention_bias or family.qkv_bias,
        mlp_bias=c.flag("mlp_bias", False),
        dtype=c.choice("torch_dtype", c.choice("dtype", "float32", tuple(MODEL_DTYPES)), tuple(MODEL_DTYPES)),
        rope=parse_rope(c, interleaved=c.flag("rope_interleave", family.interleaved)),
        latent=latent,
        experts=parse_experts(c, layers, *family.routing) if family.routing else None,
        mtp_layers=_parse_mtp(c) if family.mtp else 0,
    )


def _check_keys(c: ConfigValues, family: Family) -> None:
    for key in family.required:
        if not c.has(key):
            raise c.fail(key, "is missing; implementations' defaults for it differ")
    for key, value in family.fixed.items():
        if c.has(key) and c.values[key] != value:
            why = f": {REASONS[key]}" if key in REASONS else ""
            raise c.fail(key, f"is {c.values[key]!r}; this architecture is read with {value!r} only{why}")
    kinds = c.values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise c.fail("layer_types", "names other layers than full_attention, and no others are read")


def _parse_mtp(c: ConfigValues) -> int:
    """The hub's key, or what transformers 5 calls it."""
    other = c.integer("num_mtp_layers", 0, minimum=0, maximum=MAX_MTP_LAYERS)
    return c.integer("num_nextn_predict_layers", other, minimum=0, maximum=MAX_MTP_LAYERS)


def _parse_latent(c: ConfigValues) -> LatentAttention:
    if not c.flag("use_mla", True):  # DeepSeek-VL2's small language models
        raise c.fail("use_mla", "is false; this class is read with latent attention only")
    if "q_lora_rank" not in c.values:  # class defaults differ between implementations
        raise c.fail("q_lora_rank", "is missing; null stands for a full-rank query projection")
    return LatentAttention(
        q_lora_rank=c.integer("q_lora_rank") if c.has("q_lora_rank") else None,
        kv_lora_rank=c.integer("kv_lora_rank"),
        qk_nope_head_dim=c.integer("qk_nope_head_dim"),
        qk_rope_head_dim=c.integer("qk_rope_head_dim"),
        v_head_dim=c.integer("v_head_dim"),
    )
