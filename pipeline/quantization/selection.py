"""What becomes of each linear: asked by the config's checks, the memory plan and quantization itself.

All of them ask `Rules`, so that there is one answer. Pure Python without torch: `validate` and `plan` start in
milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from pipeline.quantization.catalog import FORMATS, GROUP_SIZES, METHODS, NONE
from pipeline.quantization.patterns import find_pattern

if TYPE_CHECKING:
    from pipeline.checkpoint.layouts import Kind

Role = Literal["experts", "shared_experts", "mlp", "attention_output", "attention_input", "head"]
QUANTIZABLE: tuple[str, ...] = get_args(Role)
# Few bytes, or much harm: an error in the router sends tokens elsewhere, one in the latent is seen by every head.
# Layers for multi-token prediction ("mtp") are no part of the network.
NEVER = ("router", "norm", "embedding", "attention_latent", "mtp")
HEAD, HEAD_NAME = "head", "lm_head"  # the projection to logits: no linear of its own where it is the embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a linear: a key of METHODS, and for a grouped format its inputs per scale. `wanted`: how many
    were asked for, which is no part of what becomes of it."""

    method: str
    group: int | None
    wanted: int | None = field(default=None, compare=False)

    @property
    def format(self) -> str:
        return METHODS[self.method].format

    @property
    def is_smaller(self) -> bool:
        """Whether the group is smaller than the one that this linear was to have, which does not divide its input."""
        return self.group is not None and self.wanted is not None and self.group < self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A recipe's row: what becomes of the linears that a shell pattern names, whatever their role. `method`: a key of
    METHODS or "none"; `group_size` None: the rules' own."""

    pattern: str
    method: str
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which linears are quantized and how: roles to include, shell patterns of engine names to leave out, the group
    wanted, and a recipe, of whose rows the first that matches decides."""

    method: str
    include: Sequence[str]
    exclude: Sequence[str] = ()
    group_size: int = 128
    recipe: Sequence[Override] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods that a linear may be given, sorted; none where nothing is quantized."""
        return tuple(sorted({self.method, *(row.method for row in self.recipe)} & METHODS.keys()))

    @property
    def measures(self) -> bool:
        return any(METHODS[method].measures for method in self.methods)

    @property
    def head_method(self) -> str:
        """A key of METHODS, or "none": what becomes of a head that is not the embedding."""
        wish = self._wish(HEAD, self._matcher(HEAD)(HEAD_NAME))
        return NONE if isinstance(wish, str) else wish[0]

    def decide(self, name: str, role: str, shape: Sequence[int]) -> Decision | str:
        """What becomes of the linear [out, in] `name`, or why it stays as it is."""
        return self._decide(role, shape, None if role in NEVER else self._matcher(role)(name))

    def count(self, kind: Kind) -> Counter[Decision | str]:
        """The decisions on a kind's linears. Names are listed only where there are patterns to hold against them."""
        role, shape = kind.first.role, kind.first.target_shape
        if role in NEVER or not (self.exclude or self.recipe):
            return Counter({self.decide(kind.first.target, role, shape): kind.count})
        decisions: Counter[Decision | str] = Counter()
        for index, count in Counter(map(self._matcher(role), kind.names())).items():
            decisions[self._decide(role, shape, index)] += count
        return decisions

    def wishes(self, kind: Kind) -> dict[tuple[str, int], tuple[str, int]]:
        """(method, group size) as asked for of a kind's linears, whether its shape allows it or not -> the first of
        them, and how many."""
        find = self._matcher(kind.first.role)
        found: dict[tuple[str, int], tuple[str, int]] = {}
        is_uniform = not (self.exclude or self.recipe)
        for name in (kind.first.target,) if is_uniform else kind.names():
            wish = self._wish(kind.first.role, find(name))
            if isinstance(wish, tuple):
                first, count = found.get(wish, (name, 0))
                found[wish] = first, count + (kind.count if is_uniform else 1)
        return found

    def idle_rows(self, kinds: Iterable[Kind]) -> tuple[str, ...]:
        """Patterns of the recipe's rows that decide nothing of these kinds, though they may name some."""
        deciding = {index for kind in kinds for index in map(self._matcher(kind.first.role), kind.names())}
        return tuple(row.pattern for i, row in enumerate(self.recipe, len(self.exclude)) if i not in deciding)

    def find_split(self, kind: Kind) -> str | None:
        """A linear of a kind that other experts of its layer do not share the format and group of; None where all do.
        Only patterns tell experts apart."""
        if kind.experts == 1 or not (self.exclude or self.recipe):
            return None
        find, decisions, layer = self._matcher(kind.first.role), set[object](), -1
        for index, name in enumerate(kind.names()):
            if index // kind.experts != layer:
                layer = index // kind.experts
                decisions.clear()
            decision = self._decide(kind.first.role, kind.first.target_shape, find(name))
            decisions.add((decision.format, decision.group) if isinstance(decision, Decision) else None)
            if len(decisions) > 1:
                return name.removesuffix(".weight")
        return None

    def _matcher(self, role: str) -> Callable[[str], int | None]:
        """A recipe's `*` means the layers: only a row that speaks of the head is for it."""
        rows = (row.pattern if role != HEAD or HEAD in row.pattern else "" for row in self.recipe)
        return find_pattern((*self.exclude, *rows))

    def _decide(self, role: str, shape: Sequence[int], index: int | None) -> Decision | str:
        """`index`: of the first of _matcher's patterns that names the linear."""
        wish = self._wish(role, index)
        return wish if isinstance(wish, str) else fit(wish[0], shape, wish[1])

    def _wish(self, role: str, index: int | None) -> tuple[str, int] | str:
        """(method, group size) as asked for, or why the linear stays as it is."""
        if role in NEVER:
            return f"role {role} is never quantized"
        if index is not None and index < len(self.exclude):
            return f"excluded by {self.exclude[index]}"
        if index is not None:
            row = self.recipe[index - len(self.exclude)]
            if row.method == NONE:
                return f"left as it is by the recipe's {row.pattern}"
            return row.method, row.group_size or self.group_size
        if role not in self.include or self.method not in METHODS:
            return f"role {role} is not included"
        return self.method, self.group_size


NOTHING = Rules(method=NONE, include=())


def fit(method: str, shape: Sequence[int], group_size: int) -> Decision | str:
    """The decision for a linear [out, in] by a method, or why its shape does not allow it."""
    rows, columns = shape
    if not FORMATS[METHODS[method].format].grouped:
        return Decision(method=method, group=None)
    if rows % 2:
        return f"its {rows} output features do not pack in pairs"
    group = pick_group(shape, group_size)
    if group is None:
        sizes = ", ".join(str(size) for size in GROUP_SIZES if size <= group_size)
        return f"no group of {sizes} divides its {columns} input features"
    return Decision(method=method, group=group, wanted=group_size)


def pick_group(shape: Sequence[int], wanted: int) -> int | None:
    """The largest group size not above `wanted` that divides the input of a linear [out, in]; None where none does.

    Nor is there one for an odd number of outputs, since two outputs share a byte.
    """
    rows, columns = shape
    return None if rows % 2 else next((size for size in GROUP_SIZES if size <= wanted and columns % size == 0), None)
