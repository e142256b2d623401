"""What every block of one network shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.network.graph import Tensor
from plugins.operation import Operation

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.spec import NetworkSpec
    from pipeline.network.weights import Weights
    from pipeline.sharding import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The model's description, its weights, and the tensors that are made once and used by every layer.

    sizes: what this rank computes of each layer. inputs: the network's inputs by name. positions: position ids as
    [T, 1]. tables: RoPE's cos and sin. mask: of attention, see `cache.attention_mask`; positions and mask are None
    where a plugin needs none. plugins: the operations of a layer that are plugins, by lowering.
    """

    architecture: Architecture
    spec: NetworkSpec
    sizes: Sizes
    weights: Weights
    inputs: Mapping[str, Tensor]
    positions: Tensor
    tables: tuple[Tensor, Tensor]
    mask: Tensor
    plugins: Mapping[str, Operation]
