"""Tensors that differ only in layer and expert, as one: a model's 45,000 weights are of some twenty kinds.

What looks at shapes and roles (memory plans, compatibility rules) looks at kinds, and its cost does not grow with the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.layout import layout_for
from pipeline.checkpoint.layouts.rows import Mapping

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`first` stands for all. `layers` are those it occurs in (one, None, for what surrounds the layers), each with
    `experts` of them."""

    first: Mapping
    layers: tuple[int | None, ...]
    experts: int

    @property
    def count(self) -> int:
        return len(self.layers) * self.experts

    def names(self) -> Iterator[str]:
        """The engine name of every tensor, layer by layer."""
        first = self.first
        if first.layer is None:
            yield first.target
            return
        before, _, after = first.target.partition(f".layers.{first.layer}.")
        for layer in self.layers:
            name = f"{before}.layers.{layer}.{after}"
            if first.expert is None:
                yield name
                continue
            head, _, tail = name.partition(f".experts.{first.expert}.")
            for expert in range(self.experts):
                yield f"{head}.experts.{expert}.{tail}"


def list_kinds(architecture: Architecture) -> list[Kind]:
    """The kinds of the model's tensors: of dense layers, of routed layers, then of what surrounds them."""
    layout = layout_for(architecture)
    kinds = []
    for routed in (False, True):
        layers = tuple(layer for layer in range(architecture.num_layers) if architecture.is_routed(layer) == routed)
        if layers:
            firsts = (mapping for mapping in layout.layer_mappings(layers[0]) if not mapping.expert)
            kinds += [Kind(first=first, layers=layers, experts=_count_experts(architecture, first)) for first in firsts]
    return [*kinds, *(Kind(first=first, layers=(None,), experts=1) for first in layout.outer_mappings())]


def _count_experts(architecture: Architecture, mapping: Mapping) -> int:
    return architecture.experts.num_routed if architecture.experts and mapping.expert is not None else 1
