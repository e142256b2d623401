"""Which experts the kernels of the plugin moe_experts take: for `validate`, and for what is a plugin by default."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.checkpoint.foreign.holding import Held, Holding
from pipeline.quantization.catalog import METHODS
from pipeline.quantization.selection import Decision, Rules

if TYPE_CHECKING:
    from pipeline.config.case import Case

# What the kernels multiply, 16-bit weights apart.
EXPERT_FORMATS = frozenset({"fp8", "fp8_blocks", "int4"})
UP, DOWN = ("fc", "gate"), ("proj",)


class Stored(NamedTuple):
    """How a linear will be stored. `input` tells apart what its input is multiplied by and rounded in."""

    format: str | None = None
    group: int | None = None
    input: str = ""

    def __str__(self) -> str:
        return f"{self.format or '16 bits'}{f' in groups of {self.group}' if self.group else ''}"


# "transformer.layers.3.mlp.experts" -> "0.fc" -> how it is stored.
Layers = Mapping[str, Mapping[str, Stored]]


def find_unfit_experts(case: Case) -> str | None:
    """Why the plugin cannot have the experts of a model, or None."""
    if case.build.lowering.moe_experts != "plugin" or case.architecture.experts is None:
        return None
    kinds = [kind for kind in case.kinds if kind.first.role == "experts"]
    shapes = {kind.first.target.split(".")[-2]: kind.first.target_shape for kind in kinds}
    layers = [layer for layer in kinds[0].layers if layer is not None]
    return judge(list_made(case.quantize.rules, layers, shapes)) or judge(list_held(case.holding))


def judge(layers: Layers) -> str | None:
    """What is wrong for the plugin's kernels, or None: a kernel reads fc and gate of all experts of a layer at once."""
    formats = {stored.format for linears in layers.values() for stored in linears.values()} - {None}
    if unknown := formats - EXPERT_FORMATS:
        return f"the plugin moe_experts has no kernel for {', '.join(sorted(filter(None, unknown)))}"
    for layer, linears in layers.items():
        up = {stored: name for name, stored in linears.items() if name.rpartition(".")[2] in UP}
        (first, name), *others = up.items()
        for other, another in others:
            places = f"{layer}.{name} and {another}"
            if first[:2] == other[:2]:
                return f"the plugin moe_experts gives fc and gate one input: {places} scale or round theirs differently"
            return f"the plugin moe_experts reads fc and gate as one: {places} are in {first} and {other}"
    return None


def list_made(rules: Rules, layers: Iterable[int], shapes: Mapping[str, Sequence[int]]) -> Layers:
    """What quantization makes of experts, whose fc, gate and proj are of `shapes`, [out, in]. Those of a layer share a
    format: the first stands for all."""
    found: dict[str, dict[str, Stored]] = {}
    for layer in layers if rules.methods else ():
        place = f"transformer.layers.{layer}.mlp.experts"
        found[place] = {
            f"0.{name}": _take(rules.decide(f"{place}.0.{name}", "experts", shapes[name])) for name in (*UP, *DOWN)
        }
    return found


def _take(decision: Decision | str) -> Stored:
    if isinstance(decision, str):
        return Stored()
    return Stored(decision.format, decision.group, decision.method if METHODS[decision.method].scales else "")


def list_held(holding: Holding) -> Layers:
    """What another tool has made of them."""
    found: dict[str, dict[str, Stored]] = defaultdict(dict)
    for name in holding:
        layer, is_expert, linear = name.partition(".experts.")
        if is_expert:  # with those beside it, which may be in 16 bits
            expert = linear.partition(".")[0]
            for each in (*UP, *DOWN):
                held = holding.get(f"{layer}.experts.{expert}.{each}.weight")
                stored = Stored(held.format, held.group, held.input) if isinstance(held, Held) else Stored()
                found[f"{layer}.experts"][f"{expert}.{each}"] = stored
    return found
