"""Which plugin stands for an operation, from what the architecture and the spec say.

A network's plugins are announced before its first layer is written, so they are made here and nowhere else: what is
announced is what is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError
from pipeline.network.rope import softmax_scale
from pipeline.sharding.sizes import local_sizes
from plugins.operation import Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture, LatentAttention
    from pipeline.network.spec import NetworkSpec

ROPE, ATTENTION = "rope_paged_kv", "paged_attention"


def rope_paged_kv(architecture: Architecture, spec: NetworkSpec) -> RopePagedKv:
    """Of grouped-query attention."""
    sizes = local_sizes(architecture, spec.rank)
    return RopePagedKv(
        dtype=spec.dtype,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=architecture.head_dim,
        rotary_size=architecture.head_dim,
        interleaved=architecture.rope.interleaved,
        scale=softmax_scale(architecture),
        block_size=spec.block_size,
        pool_dtype=spec.dtype,
    )


def rope_paged_latent(architecture: Architecture, spec: NetworkSpec) -> RopePagedLatent:
    """Of multi-head latent attention."""
    latent = _latent(architecture)
    return RopePagedLatent(
        dtype=spec.dtype,
        heads=local_sizes(architecture, spec.rank).heads,
        q_size=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        rank=latent.kv_lora_rank,
        rotary_size=latent.qk_rope_head_dim,
        interleaved=architecture.rope.interleaved,
        scale=softmax_scale(architecture),
        block_size=spec.block_size,
        pool_dtype=spec.dtype,
    )


def paged_attention(architecture: Architecture, spec: NetworkSpec) -> PagedAttention:
    """Of grouped-query attention."""
    sizes = local_sizes(architecture, spec.rank)
    return PagedAttention(
        dtype=spec.dtype,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=architecture.head_dim,
        block_size=spec.block_size,
        window=0,
        pool_dtype=spec.dtype,
    )


def paged_latent_attention(architecture: Architecture, spec: NetworkSpec) -> PagedLatentAttention:
    """Of multi-head latent attention."""
    latent = _latent(architecture)
    return PagedLatentAttention(
        dtype=spec.dtype,
        heads=local_sizes(architecture, spec.rank).heads,
        rank=latent.kv_lora_rank,
        rotary_size=latent.qk_rope_head_dim,
        block_size=spec.block_size,
        window=0,
        pool_dtype=spec.dtype,
    )


def _latent(architecture: Architecture) -> LatentAttention:
    if architecture.latent is None:
        raise CompatibilityError(f"{architecture.name} has no latent attention", hint="config.json lacks kv_lora_rank")
    return architecture.latent


# Lowering -> its operation in a layer of grouped-query attention, and in one of latent attention.
Make = Callable[["Architecture", "NetworkSpec"], Operation]
OPERATIONS: dict[str, tuple[Make, Make]] = {
    ROPE: (rope_paged_kv, rope_paged_latent),
    ATTENTION: (paged_attention, paged_latent_attention),
}


def layer_plugins(architecture: Architecture, spec: NetworkSpec) -> dict[str, Operation]:
    """The plugins of each decoder layer, by their name under its attention."""
    which = 0 if architecture.latent is None else 1
    return {name: OPERATIONS[name][which](architecture, spec) for name in spec.lowering.plugins()}


def network_plugins(architecture: Architecture, spec: NetworkSpec) -> dict[str, Operation]:
    """Every plugin of the network, by the name of its layer."""
    operations = layer_plugins(architecture, spec)
    return {
        f"layers.{layer}.attention.{name}": operation
        for layer in range(*spec.layer_range(architecture))
        for name, operation in operations.items()
    }
