"""What a decoder looks like, read once from a Hugging Face `config.json` and validated: the only reader of its keys.

Reads the hub's own keys (`rope_scaling`, `rope_theta`, `torch_dtype`) as well as those that transformers 5 writes
(`rope_parameters`, `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: `kind` is default, linear, dynamic, yarn or llama3; `scaling` holds the kind's own numbers."""

    kind: str
    theta: float
    scaling: Mapping[str, float]
    interleaved: bool  # DeepSeek-V2 rotates even/odd pairs, Llama the two halves

    def get(self, key: str, default: float) -> float:
        return self.scaling.get(key, default)


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
class Experts:
    """A routed MLP (DeepSeekMoE): which layers have it, its sizes, and how tokens choose experts."""

    num_routed: int
    num_shared: int
    top_k: int
    intermediate_size: int
    first_dense_layers: int
    layer_freq: int
    n_group: int
    topk_group: int
    topk_method: str  # greedy, group_limited_greedy, noaux_tc
    scoring_func: str  # softmax, sigmoid
    norm_topk_prob: bool
    routed_scaling_factor: float


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
    mlp_bias: bool
    dtype: str  # torch spelling: float16, bfloat16, float32
    rope: Rope
    latent: LatentAttention | None = None
    experts: Experts | None = None

    def is_routed(self, layer: int) -> bool:
        """Whether this decoder layer's MLP is routed."""
        e = self.experts
        return e is not None and layer >= e.first_dense_layers and layer % e.layer_freq == 0

    @property
    def cache_widths(self) -> tuple[tuple[int, int], ...]:
        """The KV pools of one layer as (heads, width) each: K and V, or the one latent."""
        if self.latent is not None:
            return ((1, self.latent.latent_dim),)
        return ((self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim))


# HF class -> (has latent attention, may have routed experts, rotates interleaved pairs)
ARCHITECTURES: dict[str, tuple[bool, bool, bool]] = {
    "LlamaForCausalLM": (False, False, False),
    "DeepseekV2ForCausalLM": (True, True, True),
}
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class _Config:
    """Typed access to a config.json, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.origin}: {key} {problem}", hint="compare the file with the model's own config.json on the hub"
        )

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise self.fail(key, f"must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {value!r}")
        return value

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.values.get(key) or default
        if value not in allowed:
            raise self.fail(key, f"is {value!r}; this architecture reads {', '.join(allowed)}")
        return str(value)


def parse_architecture(config: Mapping[str, Any], origin: str = "config.json") -> Architecture:
    """Reads a HF `config.json` (already parsed). `origin` is the file's name for messages. Raises CheckpointError."""
    c = _Config(config, origin)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise c.fail("architectures", f"must list one class, not {names!r}")
    name = names[0]
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{origin}: architecture {name} is not supported",
            hint=f"supported: {', '.join(ARCHITECTURES)}",
        )
    is_latent, may_route, interleaved = ARCHITECTURES[name]
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    latent = _parse_latent(c) if is_latent else None
    if latent is None and config.get("head_dim") is None and hidden % heads:
        raise c.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = latent.qk_head_dim if latent else c.integer("head_dim", hidden // heads)
    kv_heads = c.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise c.fail("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if config.get("hidden_act", "silu") != "silu":
        raise c.fail("hidden_act", f"is {config['hidden_act']!r}; only silu (SwiGLU) is supported")
    return Architecture(
        name=name,
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_layers=c.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=c.integer("vocab_size"),
        max_position_embeddings=c.integer("max_position_embeddings"),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=c.flag("tie_word_embeddings", False),
        attention_bias=c.flag("attention_bias", False),
        mlp_bias=c.flag("mlp_bias", False),
        dtype=c.choice("torch_dtype", str(config.get("dtype") or "float32"), ("float32", "float16", "bfloat16")),
        rope=_parse_rope(c, interleaved),
        latent=latent,
        experts=_parse_experts(c) if may_route and config.get("n_routed_experts") else None,
    )


def _parse_latent(c: _Config) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=c.integer("q_lora_rank") if c.values.get("q_lora_rank") is not None else None,
        kv_lora_rank=c.integer("kv_lora_rank"),
        qk_nope_head_dim=c.integer("qk_nope_head_dim"),
        qk_rope_head_dim=c.integer("qk_rope_head_dim"),
        v_head_dim=c.integer("v_head_dim"),
    )


def _parse_experts(c: _Config) -> Experts:
    experts = Experts(
        num_routed=c.integer("n_routed_experts"),
        num_shared=c.integer("n_shared_experts", 0, minimum=0),
        top_k=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer("moe_intermediate_size"),
        first_dense_layers=c.integer("first_k_dense_replace", 0, minimum=0),
        layer_freq=c.integer("moe_layer_freq", 1),
        n_group=c.integer("n_group", 1),
        topk_group=c.integer("topk_group", 1),
        topk_method=c.choice("topk_method", "greedy", ("greedy", "group_limited_greedy")),
        scoring_func=c.choice("scoring_func", "softmax", ("softmax",)),
        norm_topk_prob=c.flag("norm_topk_prob", False),
        routed_scaling_factor=c.number("routed_scaling_factor", 1.0),
    )
    if experts.num_routed % experts.n_group:
        raise c.fail("n_group", f"{experts.n_group} does not divide n_routed_experts {experts.num_routed}")
    if experts.topk_group > experts.n_group:
        raise c.fail("topk_group", f"{experts.topk_group} exceeds n_group {experts.n_group}")
    grouped = experts.topk_method == "group_limited_greedy"
    reachable = experts.num_routed // experts.n_group * experts.topk_group if grouped else experts.num_routed
    if experts.top_k > reachable:
        raise c.fail("num_experts_per_tok", f"{experts.top_k} exceeds the {reachable} experts routing can reach")
    return experts


def _parse_rope(c: _Config, interleaved: bool) -> Rope:
    raw = c.values.get("rope_scaling") or c.values.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise c.fail("rope_scaling", f"must be a mapping, not {raw!r}")
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise c.fail("rope_scaling", f"has type {kind!r}; known types: {', '.join(ROPE_KINDS)}")
    theta = c.number("rope_theta", float(raw.get("rope_theta", 10000.0)))
    scaling: dict[str, float] = {}
    for key, value in raw.items():
        if key in ("type", "rope_type", "rope_theta"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise c.fail(f"rope_scaling.{key}", f"must be a number, not {value!r}")
        scaling[key] = float(value)
    missing = [key for key in ROPE_KINDS[kind] if key not in scaling]
    if missing:
        raise c.fail("rope_scaling", f"of type {kind} needs {', '.join(missing)}")
    return Rope(kind=kind, theta=theta, scaling=scaling, interleaved=interleaved)
