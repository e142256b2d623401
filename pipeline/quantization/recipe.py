"""A recipe: what becomes of each unit, solved from measured sensitivity within a budget, and written as YAML.

The KL divergences of units quantized alone are added up: to second order, and for errors that do not know of each
other, they are independent (HAWQ-V2, Dong et al., arXiv 1911.03852, adds up in the same way).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigError
from pipeline.quantization.catalog import METHODS, NONE
from pipeline.quantization.knapsack import select
from pipeline.quantization.options import Candidate, Goal
from pipeline.quantization.selection import Override

RECIPE = "recipe.yaml"
SUM = "# As it was solved: "  # the last line, with a checksum of those before


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was chosen for one unit, and why."""

    override: Override
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`kl`: predicted nats per token. `size_ratio`, `bits_per_weight`: as the budgets of these names count."""

    goal: Goal
    rows: tuple[Row, ...]
    kl: float
    size_ratio: float
    bits_per_weight: float
    counts: Mapping[str, int]

    def render(self) -> str:
        """YAML that `stages.quantize.recipe` takes."""
        used = ", ".join(f"{name} {count}x" for name, count in sorted(self.counts.items()))
        lines = [
            f"# Solved for {self.goal.kind} {self.goal.limit:g}. The first row that names a linear decides: edit it.",
            f"# Predicted: KL {self.kl:.3g} nats a token, size ratio {self.size_ratio:.4f}, "
            f"{self.bits_per_weight:.3f} bits a weight. Units: {used}.",
            "rows:",
        ]
        for row in self.rows:
            values: dict[str, Any] = {"pattern": row.override.pattern, "method": row.override.method}
            if row.override.group_size:
                values["group_size"] = row.override.group_size
            fields = ", ".join(f"{key}: {_scalar(value)}" for key, value in (*values.items(), ("reason", row.reason)))
            lines.append(f"  - {{{fields}}}")
        text = "\n".join(lines) + "\n"
        return f"{text}{SUM}{zlib.crc32(text.encode()):08x}\n"


def is_edited(text: str) -> bool:
    """Whether a recipe's file is anything else than what `Recipe.render` once wrote."""
    body, _, found = text.rpartition(SUM)
    return found != f"{zlib.crc32(body.encode()):08x}\n"


@dataclass(frozen=True, slots=True)
class _Option:
    candidate: Candidate
    nbytes: int
    kl: float


def solve(sensitivity: Mapping[str, Any], method: str, goal: Goal, *, formats: Sequence[str] | None = None) -> Recipe:
    """The best recipe for what `measure_sensitivity` found. `method` makes the format that it makes, whatever stood in
    for it; `formats`: those that may be used, None for all that were measured. Raises ConfigError for a budget that
    cannot be met.
    """
    units = sensitivity["units"]
    options = [_list_options(unit, method, formats) for unit in units]
    sizes = [[float(option.nbytes) for option in row] for row in options]
    losses = [[option.kl for option in row] for row in options]
    whole, wide = sensitivity["bytes"], sum(unit["bytes"] for unit in units)
    weights = sum(unit["weights"] for unit in units)
    if goal.kind == "kl":
        chosen = select(losses, sizes, goal.limit)
    else:
        limit = goal.limit * whole - (whole - wide) if goal.kind == "size_ratio" else goal.limit * weights / 8
        chosen = select(sizes, losses, limit)
    if chosen is None:
        least = sum(min(row) for row in (losses if goal.kind == "kl" else sizes))
        possible = {
            "kl": least,
            "size_ratio": (whole - wide + least) / whole,
            "bits_per_weight": 8 * least / weights,
        }[goal.kind]
        raise ConfigError(
            f"stages.quantize.budget.{goal.kind}: {goal.limit:g} cannot be met: the least is {possible:.4g}",
            hint="raise the budget, include more roles, or allow more formats (stages.quantize.sensitivity.formats)",
        )
    picked = [row[i] for row, i in zip(options, chosen, strict=True)]
    nbytes = sum(option.nbytes for option in picked)
    counts: dict[str, int] = {}
    for option in picked:
        counts[option.candidate.name] = counts.get(option.candidate.name, 0) + 1
    return Recipe(
        goal=goal,
        rows=tuple(
            row for unit, one, all_ in zip(units, picked, options, strict=True) for row in _explain(unit, one, all_)
        ),
        kl=sum(option.kl for option in picked),
        size_ratio=(whole - wide + nbytes) / whole,
        bits_per_weight=8 * nbytes / weights,
        counts=counts,
    )


def _list_options(unit: Mapping[str, Any], method: str, formats: Sequence[str] | None) -> list[_Option]:
    """Every candidate that was measured, and leaving the unit as it is, which costs no KL."""
    options = [_Option(Candidate(method=NONE), unit["bytes"], 0.0)]
    for name, figures in unit["candidates"].items():
        measured = Candidate.parse(name)
        form = METHODS[measured.method].format
        if formats is not None and form not in formats:
            continue
        real = method if method in METHODS and METHODS[method].format == form else measured.method
        vectors = unit["vector_bytes"] if METHODS[real].measures and not METHODS[measured.method].measures else 0
        candidate = Candidate(method=real, group_size=measured.group_size)
        options.append(_Option(candidate, figures["bytes"] + vectors, figures["kl"]))
    return options


def _explain(unit: Mapping[str, Any], picked: _Option, options: Sequence[_Option]) -> list[Row]:
    """A row for each of the unit's patterns, with what the next smaller and the next better option would have done."""
    smaller = max((o for o in options if o.nbytes < picked.nbytes), key=lambda o: o.nbytes, default=None)
    better = min((o for o in options if o.kl < picked.kl and o.nbytes > picked.nbytes), key=_size, default=None)
    reason = f"KL {picked.kl:.2g} in {8 * picked.nbytes / unit['weights']:.2f} bits"
    if smaller is not None:
        reason += f"; {smaller.candidate.name} would make it {smaller.kl:.2g}"
    if better is not None:
        reason += f"; {better.candidate.name} {better.kl:.2g} for {8 * better.nbytes / unit['weights']:.2f} bits"
    c = picked.candidate
    return [
        Row(override=Override(pattern=pattern, method=c.method, group_size=c.group_size), reason=reason)
        for pattern in unit["patterns"]
    ]


def _size(option: _Option) -> int:
    return option.nbytes


def _scalar(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and not value.isidentifier() else str(value)
