"""One model over several GPUs, as sizes: what a rank holds of each kind of tensors and computes. For `plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.sharding.divisions import WAYS
from pipeline.sharding.ranks import Parallel, Rank, layers
from pipeline.sharding.slices import EMBEDDING
from pipeline.sharding.spreading import Spreading

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind


def count_exchanged(architecture: Architecture, parallel: Parallel) -> int:
    """How many times a step's rows the experts of one GPU are sent at most: once for each expert that a token may have
    there."""
    experts = architecture.experts
    return 1 if parallel.expert == 1 or experts is None else min(experts.top_k, experts.num_routed // parallel.expert)


def count_held(kind: Kind, architecture: Architecture, rank: Rank) -> int:
    """How many tensors of a kind the rank holds, or holds a part of."""
    first, last = layers(architecture, rank)
    if kind.first.layer is not None:
        share = rank.parallel.expert if kind.first.expert is not None else 1
        return sum(1 for layer in kind.layers if layer in range(first, last)) * kind.experts // share
    is_first = kind.first.target.startswith(EMBEDDING)
    at = 0 if is_first and not architecture.tie_word_embeddings else architecture.num_layers - 1
    return kind.count if first <= at < last or (is_first and first == 0) else 0


def count_sharers(kind: Kind, spreading: Spreading, parallel: Parallel) -> int:
    """Among how many GPUs the elements of each such tensor are divided."""
    stored = spreading.dimensions(spreading.pattern(kind.first.target), None, 0)
    axes = {part.axis for dimension in stored for part in dimension.parts if part.axis is not None}
    return max((WAYS[axis][0](parallel) for axis in axes), default=1)


def shrink(architecture: Architecture, rank: Rank) -> Architecture:
    """What one GPU computes, as a model of its own. The columns of its shared experts follow from the routed ones', and
    are counted `expert` times too many. Key/value heads that are fewer than GPUs are repeated (TensorRT-LLM's way)."""
    experts, parallel = architecture.experts, rank.parallel
    first, last = layers(architecture, rank)
    return replace(
        architecture,
        num_heads=architecture.num_heads // parallel.tensor,
        num_kv_heads=max(1, architecture.num_kv_heads // parallel.tensor),
        intermediate_size=architecture.intermediate_size // parallel.tensor,
        num_layers=last - first,
        experts=experts
        and replace(
            experts,
            num_routed=experts.num_routed // parallel.expert,
            intermediate_size=experts.intermediate_size // parallel.moe_tensor,
            first_dense_layers=min(max(0, experts.first_dense_layers - first), last - first),
        ),
    )
