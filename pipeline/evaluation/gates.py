"""Gates: measured values held against bounds. A failed one stops the pipeline, with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import GateError

Relation = Literal["<=", ">="]


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

    def describe(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "skip"}[self.passed]
        limit = "off" if self.bound is None else f"{self.relation} {self.bound:.3g}"
        value = "-" if self.value is None else f"{self.value:.4g}"
        return f"{verdict}  {self.name:<20} {value:<10} {limit:<12} {self.meaning}"

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
        lines.append(
            f"  {gate.name}: {_spell(gate.value)}, must be {gate.relation} {gate.bound:.3g} ({gate.meaning}){blame}"
        )
    raise GateError(
        "\n".join(lines),
        hint="quality gates: quantize fewer linears (stages.quantize.exclude), a smaller group_size or more "
        "calibration text; proof gates: a fault in the checkpoint or in trtseek, never loosen those to ship",
    )


def _spell(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
