"""How an engine checkpoint's tensors divide, whatever they are stored as.

Every tensor belongs to a row of its architecture's layout, which names the dimensions it has: how a dimension is spread
is one table here, and how a format stores rows and columns another. So one rule cuts weights of every format with their
scales: q, k and v of a fused weight each by heads, MLA's query and value projections by heads while its latent is
whole, the embedding and the head by vocabulary, experts by columns within the ranks that have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.checkpoint.layouts import LAYOUTS
from pipeline.checkpoint.layouts.scales import (
    ACTIVATION_SCALES,
    BLOCK,
    BLOCK_SCALES,
    CACHE_SCALES,
    CHANNEL_SCALES,
    PRESCALE,
    WEIGHT_SCALES,
    WEIGHT_SCALES_2,
)
from pipeline.errors import CheckpointError
from pipeline.sharding.divisions import Axis, Division

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture

# The layouts' dimensions that are spread over ranks; the others every rank has whole.
SPREAD: dict[str, Axis] = {
    "vocab": "tensor",
    "q": "tensor",
    "kv": "tensor",
    "v": "tensor",
    "intermediate": "tensor",
    "shared": "tensor",
    "expert": "moe_tensor",
}
Side = Literal["rows", "columns"]
# The dimensions of a stored tensor: which side of the linear it counts, in steps of how many. GROUP: what one scale is
# for. No dimension: one number for the whole, or nothing that a rank has its own of.
Storage = tuple[tuple[Side, int], ...]
GROUP = 0
WEIGHT: Storage = (("rows", 1), ("columns", 1))
ROWS: Storage = (("rows", 1),)
COLUMNS: Storage = (("columns", 1),)
INT4: dict[str, Storage] = {
    "weight": (("rows", 2), ("columns", 1)),
    WEIGHT_SCALES: (("rows", 1), ("columns", GROUP)),
    PRESCALE: COLUMNS,
}
# Format (None: plain) -> the tensors of a linear, by their suffix.
FORMATS: dict[str | None, dict[str, Storage]] = {
    None: {"weight": WEIGHT},
    "int4": INT4,
    "int4_fp8": {**INT4, WEIGHT_SCALES_2: (), ACTIVATION_SCALES: ()},
    "fp8": {"weight": WEIGHT, WEIGHT_SCALES: (), ACTIVATION_SCALES: ()},
    "fp8_rows": {"weight": WEIGHT, CHANNEL_SCALES: ROWS, ACTIVATION_SCALES: ()},
    "fp8_blocks": {"weight": WEIGHT, BLOCK_SCALES: (("rows", BLOCK), ("columns", BLOCK))},
    "int8": {"weight": WEIGHT, CHANNEL_SCALES: ROWS},
    "int8_sq": {"weight": WEIGHT, WEIGHT_SCALES: ROWS, ACTIVATION_SCALES: (), PRESCALE: COLUMNS},
}
GROUPED = frozenset(name for name, tensors in FORMATS.items() if ("columns", GROUP) in tensors.get(WEIGHT_SCALES, ()))
UNITS = {2: "packed pairs of rows", BLOCK: f"whole FP8 blocks of {BLOCK}", GROUP: "groups of {group} inputs"}
_NUMBER = re.compile(r"(?<=\.layers\.)\d+|(?<=\.experts\.)\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one side of a linear: `size` rows or columns, spread over the ranks of an axis, or whole on each."""

    size: int
    axis: Axis | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One dimension of a stored tensor: the parts of the side that it counts, in steps of `unit`, called `what`."""

    parts: tuple[Part, ...]
    unit: int
    what: str

    @property
    def size(self) -> int:
        """Of the dimension as it is stored."""
        return -(-sum(part.size for part in self.parts) // self.unit)

    def divisions(self, base: str) -> list[Division]:
        """What it asks beyond the architecture's own sizes."""
        if self.unit == 1:
            return []
        found, start = [], 0
        for part in self.parts:
            aligned = start % self.unit == part.size % self.unit == 0
            if part.axis is not None:
                found.append(Division(part.axis, part.size // self.unit if aligned else 1, f"{self.what} of {base}"))
            start += part.size
        return found

    def cut(self, ways: Mapping[Axis, int], places: Mapping[Axis, int]) -> list[tuple[int, int]] | None:
        """The stretches [start, stop) of the stored dimension that a rank has; None for all of it. The divisions
        hold."""
        if all(part.axis is None or ways[part.axis] == 1 for part in self.parts):
            return None
        found, start = [], 0
        for part in self.parts:
            share = part.size // (ways[part.axis] if part.axis else 1)
            first = start + share * (places[part.axis] if part.axis else 0)
            found.append((first // self.unit, -(-(first + share) // self.unit)))
            start += part.size
        return found


class Spreading:
    """How the tensors of one architecture divide."""

    def __init__(self, architecture: Architecture) -> None:
        layout = LAYOUTS[architecture.name]
        self._sizes = {name: dimension.size for name, dimension in layout.list_dimensions(architecture).items()}
        self._rows = {row.target: row for row in layout.ROWS if not row.mtp}

    def pattern(self, name: str) -> str:
        """The name in its layout's spelling, without the numbers of layer and expert."""
        return _NUMBER.sub(lambda found: "{e}" if found.string[: found.start()].endswith("experts.") else "{l}", name)

    def dimensions(self, pattern: str, form: str | None, group: int) -> tuple[Stored, ...]:
        """Of each dimension of a tensor of a linear in a format, or of a vector. `pattern` as above; `group`: inputs
        per scale. Raises CheckpointError for a tensor that no rule is for."""
        if pattern.endswith(CACHE_SCALES):
            return ()
        base, _, suffix = pattern.rpartition(".")
        row = self._rows.get(pattern) or self._rows.get(f"{base}.weight")
        storage = ROWS if pattern in self._rows and row and not row.columns else FORMATS[form].get(suffix)
        if row is None or storage is None:
            raise CheckpointError(
                f"tensor {pattern} ({form or 'not quantized'}) cannot be divided over ranks: its kind is unknown",
                hint="quantize the checkpoint again with this version",
            )
        sides = {"rows": self._parts(row.rows), "columns": self._parts((row.columns,) if row.columns else ())}
        return tuple(
            Stored(parts=sides[side], unit=unit or group, what=UNITS.get(unit, "").format(group=group))
            for side, unit in storage
        )

    def linear_divisions(self, base: str, form: str | None, group: int = 0) -> list[Division]:
        """What a linear in a format asks beyond the architecture's own sizes; `base` without ".weight"."""
        pattern = self.pattern(base)
        return [
            division
            for suffix in FORMATS[form]
            for stored in self.dimensions(f"{pattern}.{suffix}", form, group)
            for division in stored.divisions(base)
        ]

    def _parts(self, names: Sequence[str]) -> tuple[Part, ...]:
        return tuple(Part(self._sizes[name], SPREAD.get(name)) for name in names)
