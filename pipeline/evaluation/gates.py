"""Gates: measured values held against bounds. A failed one stops the pipeline, with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import GateError

Relation = Literal["<=", ">="]
DIGITS = 17  # that tell any two floats apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One comparison. `bound` None means that the user turned the gate off: it is reported as skipped. `value` None:
    the config asks for nothing that would measure it."""

    name: str
    value: float | None
    bound: float | None
    relation: Relation
    meaning: str  # what the value is, with its unit
    blame: str = ""  # where to look when it fails: the worst layer, the worst tensor

    @property
    def passed(self) -> bool | None:
        """None when skipped. A value that is not finite never passes."""
        if self.bound is None:
            return None
        if self.value is None or not math.isfinite(self.value):
            return False
        return self.value <= self.bound if self.relation == "<=" else self.value >= self.bound

    @property
    def limit(self) -> str:
        return "off" if self.bound is None else f"{self.relation} {spell_bound(self.bound)}"

    def describe(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "skip"}[self.passed]
        value = "-" if self.value is None else spell_value(self.value, self.bound)
        return f"{verdict}  {self.name:<20} {value:<10} {self.limit:<12} {self.meaning}"

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "bound": self.bound,
            "relation": self.relation,
            "passed": self.passed,
            "meaning": self.meaning,
            "blame": self.blame,
        }


def enforce(gates: Sequence[Gate], report: str) -> None:
    """Raises GateError naming every failed gate and where to look; `report` is the path of what was kept."""
    failed = [gate for gate in gates if gate.passed is False]
    if not failed:
        return
    judged = sum(gate.passed is not None for gate in gates)
    lines = [f"{len(failed)} of {judged} verification gates failed (report: {report})"]
    for gate in failed:
        blame = f"; {gate.blame}" if gate.blame else ""
        value = "not measured" if gate.value is None else spell_value(gate.value, gate.bound)
        lines.append(f"  {gate.name}: {value}, must be {gate.limit} ({gate.meaning}){blame}")
    raise GateError(
        "\n".join(lines),
        hint="quality gates: quantize fewer linears (stages.quantize.exclude), a smaller group_size or more "
        "calibration text; proof gates: a fault in the checkpoint or in trtseek, never loosen those to ship",
    )


def spell_bound(bound: float) -> str:
    """As it was written."""
    return f"{bound:.12g}"


def spell_value(value: float, bound: float | None) -> str:
    """In four digits, or as many as it takes to be on its own side of the bound."""
    texts = (f"{value:.{digits}g}" for digits in range(4, DIGITS + 1))
    if bound is None or not math.isfinite(value):
        return next(texts)
    return next(text for text in texts if _compare(float(text), bound) == _compare(value, bound))


def _compare(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)
