"""Which plugin stands for an operation, from what the architecture and the spec say.

A network's plugins are announced before its first layer is written, so they are made here and nowhere else: what is
announced is what is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.errors import CompatibilityError
from pipeline.network.expert_plugin import EXPERTS, make_experts
from pipeline.network.rope import softmax_scale
from pipeline.sharding.sizes import local_sizes
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.operation import Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture, Experts, LatentAttention
    from pipeline.network.spec import NetworkSpec
    from pipeline.network.weights import Weights

ROPE, ATTENTION, ALL_TO_ALL = "rope_paged_kv", "paged_attention", "moe_all_to_all"


def rope_paged_kv(architecture: Architecture, spec: NetworkSpec) -> RopePagedKv:
    """Of grouped-query attention."""
    return RopePagedKv(**_grouped(architecture, spec), **_rotated(architecture), rotary_size=architecture.head_dim)


def rope_paged_latent(architecture: Architecture, spec: NetworkSpec) -> RopePagedLatent:
    """Of multi-head latent attention."""
    latent = _latent(architecture)
    return RopePagedLatent(
        **_paged(architecture, spec),
        **_rotated(architecture),
        q_size=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        rank=latent.kv_lora_rank,
        rotary_size=latent.qk_rope_head_dim,
    )


def paged_attention(architecture: Architecture, spec: NetworkSpec) -> PagedAttention:
    """Of grouped-query attention."""
    return PagedAttention(**_grouped(architecture, spec), window=0)


def paged_latent_attention(architecture: Architecture, spec: NetworkSpec) -> PagedLatentAttention:
    """Of multi-head latent attention."""
    latent = _latent(architecture)
    return PagedLatentAttention(
        **_paged(architecture, spec), rank=latent.kv_lora_rank, rotary_size=latent.qk_rope_head_dim, window=0
    )


def _paged(architecture: Architecture, spec: NetworkSpec) -> dict[str, Any]:
    """What all that works on the paged pool has in common."""
    heads = local_sizes(architecture, spec.rank).heads
    return {"dtype": spec.dtype, "heads": heads, "block_size": spec.block_size, "pool_dtype": spec.pool_dtype}


def _grouped(architecture: Architecture, spec: NetworkSpec) -> dict[str, Any]:
    kv_heads = local_sizes(architecture, spec.rank).kv_heads
    return _paged(architecture, spec) | {"kv_heads": kv_heads, "head_size": architecture.head_dim}


def _rotated(architecture: Architecture) -> dict[str, Any]:
    return {"interleaved": architecture.rope.interleaved, "scale": softmax_scale(architecture)}


def moe_dispatch(architecture: Architecture, spec: NetworkSpec) -> MoeDispatch:
    return MoeDispatch(**_exchanged(architecture, spec), payload=spec.expert_payload)


def moe_combine(architecture: Architecture, spec: NetworkSpec) -> MoeCombine:
    return MoeCombine(**_exchanged(architecture, spec))


def _exchanged(architecture: Architecture, spec: NetworkSpec) -> dict[str, Any]:
    """What both ways of an exchange have in common."""
    group, experts = spec.rank.expert_group, _experts(architecture)
    return {
        "dtype": spec.dtype,
        "first": group[0],
        "ranks": len(group),
        "experts": experts.num_routed,
        "top_k": experts.top_k,
        "hidden": architecture.hidden_size,
    }


def _experts(architecture: Architecture) -> Experts:
    if architecture.experts is None:
        raise CompatibilityError(
            f"{architecture.name} has no routed experts", hint="config.json lacks n_routed_experts"
        )
    return architecture.experts


def _latent(architecture: Architecture) -> LatentAttention:
    if architecture.latent is None:
        raise CompatibilityError(f"{architecture.name} has no latent attention", hint="config.json lacks kv_lora_rank")
    return architecture.latent


Make = Callable[["Architecture", "NetworkSpec"], Operation]
# Lowering -> its operation in a layer of grouped-query attention, and in one of latent attention.
ATTENTIONS: dict[str, tuple[Make, Make]] = {
    ROPE: (rope_paged_kv, rope_paged_latent),
    ATTENTION: (paged_attention, paged_latent_attention),
}
# Lowering -> its operations in a routed layer whose experts are on several ranks.
EXCHANGES: dict[str, tuple[Make, ...]] = {ALL_TO_ALL: (moe_dispatch, moe_combine)}


def attention_plugins(architecture: Architecture, spec: NetworkSpec) -> dict[str, Operation]:
    """The plugins of each layer's attention, by lowering."""
    which = 0 if architecture.latent is None else 1
    chosen = [name for name in spec.lowering.plugins() if name in ATTENTIONS]
    return {name: ATTENTIONS[name][which](architecture, spec) for name in chosen}


def routed_plugins(architecture: Architecture, spec: NetworkSpec) -> dict[str, Operation]:
    """The plugins of each routed layer's experts, by their own names."""
    spread = architecture.experts is not None and spec.rank.parallel.expert > 1
    makers = [make for name in spec.lowering.plugins() if spread for make in EXCHANGES.get(name, ())]
    return {operation.NAME: operation for operation in (make(architecture, spec) for make in makers)}


def network_plugins(architecture: Architecture, spec: NetworkSpec, weights: Weights) -> dict[str, Operation]:
    """Every plugin of the network, by the name of its layer."""
    attention, routed = attention_plugins(architecture, spec), routed_plugins(architecture, spec)
    found: dict[str, Operation] = {}
    for layer in range(*spec.layer_range(architecture)):
        found |= {f"layers.{layer}.attention.{name}": operation for name, operation in attention.items()}
        if architecture.is_routed(layer):
            place = f"layers.{layer}.mlp.experts."
            found |= {place + name: operation for name, operation in routed.items()}
            if EXPERTS in spec.lowering.plugins():
                found[place + EXPERTS] = make_experts(architecture, spec, weights, place)
    return found
