"""What one choice of format is made for: the linears of a layer that share a scale, and all experts of a layer.

Linears that read one input share its scale (`scale_groups`), and the experts of a layer are computed as stacks, which
have one format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import layout_for
from pipeline.quantization.options import Candidate
from pipeline.quantization.rules import Linear, choose_linears
from pipeline.quantization.scale_groups import scale_groups
from pipeline.quantization.selection import HEAD, Decision, Rules

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorInfo

EXPERTS = "mlp.experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Linears with one choice. `place` tells it from the others of its layer: "attention.qkv", "mlp.fc+gate",
    "mlp.experts"; `patterns` name its linears in a recipe."""

    layer: int
    place: str
    linears: tuple[Linear, ...]

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.place}"

    @property
    def patterns(self) -> tuple[str, ...]:
        if self.place == EXPERTS:
            return (f"transformer.layers.{self.layer}.{EXPERTS}.*",)
        return tuple(linear.name for linear in self.linears)

    @property
    def weights(self) -> int:
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)

    def treat(self, candidate: Candidate) -> dict[str, Linear] | None:
        """Its linears under a candidate other than "none"; None where a shape does not allow it."""
        treated = {}
        for linear in self.linears:
            decision = candidate.fit(linear.shape)
            if not isinstance(decision, Decision):
                return None
            treated[linear.name] = replace(linear, method=decision.method, group=decision.group)
        return treated


def list_units(architecture: Architecture, tensors: Mapping[str, TensorInfo], rules: Rules) -> list[Unit]:
    """The units of what the rules, without their recipe, quantize; layer by layer, and so without the head.

    Raises CompatibilityError as `choose_linears` does.
    """
    mappings = layout_for(architecture).mappings()
    roles = [role for role in rules.include if role != HEAD]
    linears = choose_linears(mappings, tensors, replace(rules, include=roles, recipe=())).linears
    present: dict[int, set[str]] = {layer: set() for layer in range(architecture.num_layers)}
    for mapping in mappings:
        if mapping.layer in present and mapping.target in tensors:
            present[mapping.layer].add(mapping.target.removesuffix(".weight"))
    units: dict[tuple[int, str], list[Linear]] = {}
    for layer, names in present.items():
        chosen = {name for name in names if name in linears}
        for group in scale_groups(architecture, layer, names, chosen):
            found = [linears[name] for name in group.linears]
            units.setdefault((layer, _place(layer, found)), []).extend(found)
    return [Unit(layer=layer, place=place, linears=tuple(found)) for (layer, place), found in units.items()]


def _place(layer: int, linears: Sequence[Linear]) -> str:
    if linears[0].expert is not None:
        return EXPERTS
    first, *others = (linear.name.removeprefix(f"transformer.layers.{layer}.") for linear in linears)
    return "+".join([first, *(name.rpartition(".")[2] for name in others)])
