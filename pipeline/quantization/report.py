"""quantization.json: what became of every linear and every expert, and what it saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT = "quantization.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """`linears`: by name, group size, alpha, where the scale went, whether clipped, output error before and after.

    `unquantized`: the other weight matrices, with the reason. `experts`: by routed layer, calibration tokens per expert
    and the policy applied to those with too few. Losses are squared output error over squared output on the sampled
    calibration rows, or null where nothing was measured.
    """

    method: str
    quant_algo: str
    group_size: int
    calibration: dict[str, Any] | None
    linears: dict[str, dict[str, Any]]
    unquantized: dict[str, str]
    smaller_groups: dict[str, int]
    idle_patterns: list[str]
    experts: dict[str, dict[str, Any]]
    bytes_before: int
    bytes_after: int

    @property
    def ratio(self) -> float:
        """Size after over size before."""
        return self.bytes_after / self.bytes_before

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "quant_algo": self.quant_algo,
            "group_size": self.group_size,
            "calibration": self.calibration,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "ratio": round(self.ratio, 6),
            "smaller_groups": self.smaller_groups,
            "idle_patterns": self.idle_patterns,
            "experts": self.experts,
            "linears": self.linears,
            "unquantized": self.unquantized,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> QuantizationReport:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return QuantizationReport(**{key: value for key, value in values.items() if key != "ratio"})
