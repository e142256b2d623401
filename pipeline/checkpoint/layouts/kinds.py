"""Tensors that differ only in layer and expert, as one: a model's 45,000 weights are of some twenty kinds.

What looks at shapes and roles (memory plans, compatibility rules) looks at kinds, and its cost does not grow with the
model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.layout import layout_for
from pipeline.checkpoint.layouts.rows import Mapping
from pipeline.checkpoint.layouts.scales import FP8, scale_mapping

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorInfo


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
        return self.expand(self.first.target)

    def expand(self, name: str) -> Iterator[str]:
        """The names that are to the others as `name` is to the first: an engine name, or one of its sources."""
        first = self.first
        if first.layer is None:
            yield name
            return
        before, _, after = name.partition(f".layers.{first.layer}.")
        if first.expert is None:
            for layer in self.layers:
                yield f"{before}.layers.{layer}.{after}"
            return
        middle, _, tail = after.partition(f"experts.{first.expert}.")
        for layer in self.layers:
            head = f"{before}.layers.{layer}.{middle}experts."
            for expert in range(self.experts):
                yield f"{head}{expert}.{tail}"


def list_kinds(architecture: Architecture) -> list[Kind]:
    """The kinds of the model's tensors: of dense layers, of routed layers, then of what surrounds them."""
    layout = layout_for(architecture)
    kinds = []
    for routed in (False, True):
        layers = tuple(layer for layer in range(architecture.num_layers) if architecture.is_routed(layer) == routed)
        if layers:
            for first in layout.layer_mappings(layers[0], experts=1):
                kinds.append(Kind(first=first, layers=layers, experts=_count_experts(architecture, first)))
    return [*kinds, *(Kind(first=first, layers=(None,), experts=1) for first in layout.outer_mappings())]


def _count_experts(architecture: Architecture, mapping: Mapping) -> int:
    return architecture.experts.num_routed if architecture.experts and mapping.expert is not None else 1


def matches_plainly(
    architecture: Architecture, tensors: AbstractMapping[str, TensorInfo], *, fp8_roles: Collection[str] | None = None
) -> bool:
    """Whether `tensors` are the architecture's to the last one, seen a kind at a time: what Layout.match finds in ten
    times the time. False says nothing: it may be that only the careful look can judge, and say what is wrong.

    `fp8_roles` are roles that must be in FP8 throughout, where the checkpoint says that it is.
    """
    left = len(tensors)
    for kind in list_kinds(architecture):
        first = kind.first
        if kind.count * len(first.sources) > left:
            return False
        found = _find_plainly(kind, first, tensors)
        if found is None:
            return False
        left -= kind.count * len(first.sources)
        if found == {FP8}:
            scales = scale_mapping(first)
            if _find_plainly(kind, scales, tensors) != {"F32"}:
                return False
            left -= kind.count * len(first.sources)
        elif FP8 in found or (fp8_roles and first.role in fp8_roles and len(first.target_shape) == 2):
            return False
    if left == 0:
        return True
    # Layers for multi-token prediction are few; a checkpoint has all of their tensors, or none.
    for mapping in layout_for(architecture).mtp_mappings():
        if mapping.sources[0] not in tensors:
            return False
        info = tensors[mapping.sources[0]]
        expected = [mapping, scale_mapping(mapping)] if info.dtype == FP8 else [mapping]
        for each, dtype in zip(expected, (info.dtype, "F32"), strict=False):
            (name,), (shape,) = each.sources, each.source_shapes
            if name not in tensors or tensors[name] != (name, dtype, shape):
                return False
            left -= 1
    return left == 0


def _find_plainly(kind: Kind, first: Mapping, tensors: AbstractMapping[str, TensorInfo]) -> set[str] | None:
    """The types of all sources of a kind; None where one is not there, or of another shape."""
    types: set[str] = set()
    for source, shape in zip(first.sources, first.source_shapes, strict=True):
        infos = [tensors.get(name) for name in kind.expand(source)]
        if None in infos or {info.shape for info in infos if info} != {shape}:
            return None
        types |= {info.dtype for info in infos if info}
    return types
