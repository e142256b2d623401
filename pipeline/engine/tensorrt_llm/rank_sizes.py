"""A model's sizes as the ranks of a TensorRT-LLM checkpoint hold it, where those do not divide evenly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.sharding.ranks import Parallel


def share_out(architecture: Architecture, parallel: Parallel) -> Architecture:
    """As the ranks hold it: `repeat_heads`, and the embedding's and the head's rows padded to a multiple of the tensor
    parallel size."""
    rows = -(-architecture.vocab_size // parallel.tensor) * parallel.tensor
    return replace(repeat_heads(architecture, parallel), vocab_size=rows)


def repeat_heads(architecture: Architecture, parallel: Parallel) -> Architecture:
    """With fewer key/value heads than ranks, several ranks have the same head."""
    heads = architecture.num_kv_heads
    if architecture.latent is not None or heads >= parallel.tensor or parallel.tensor % heads:
        return architecture
    return replace(architecture, num_kv_heads=parallel.tensor)
