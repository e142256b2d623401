"""What one rank computes of each layer, as counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.sharding.divisions import check_division, divisions
from pipeline.sharding.ranks import Rank, experts

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A rank's attention heads, key/value heads (MLA's latent is one, on every rank), MLP columns, rows of the
    embedding and the head, routed experts, columns of each of those, and columns of the shared expert."""

    heads: int
    kv_heads: int
    columns: int
    vocabulary: int
    experts: range
    expert_columns: int
    shared_columns: int


def local_sizes(architecture: Architecture, rank: Rank) -> Sizes:
    """Raises CompatibilityError, with the sizes that would work, for what does not divide."""
    a, parallel = architecture, rank.parallel
    check_division(parallel, divisions(a))
    width, shared = (a.experts.intermediate_size, a.experts.num_shared) if a.experts is not None else (0, 0)
    return Sizes(
        heads=a.num_heads // parallel.tensor,
        kv_heads=1 if a.latent is not None else a.num_kv_heads // parallel.tensor,
        columns=a.intermediate_size // parallel.tensor,
        vocabulary=a.vocab_size // parallel.tensor,
        experts=experts(a, rank),
        expert_columns=width // parallel.moe_tensor,
        shared_columns=width * shared // parallel.tensor,
    )
