"""`conversion.json`: what a conversion read, wrote, cast and lost. Equal conversions write equal reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.casting import Losses

REPORT = "conversion.json"

ShardLosses = dict[str, Losses]  # target tensor -> what its cast lost; only tensors that lost something


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """`casts` counts source tensors per change of type; `overflow` (number clipped, largest magnitude) and `underflow`
    (non-zeros that became zero) are per target tensor, only where there were any; `unused` are source tensors that
    nothing reads. `foreign`: of a source that another tool has quantized, what its linears became."""

    dtype: str
    tensors: int
    source_bytes: int
    target_bytes: int
    casts: dict[str, int]
    overflow: dict[str, tuple[int, float]]
    underflow: dict[str, int]
    unused: list[str]
    shards: list[str]
    foreign: dict[str, Any] | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> ConversionReport:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["overflow"] = {name: tuple(pair) for name, pair in values["overflow"].items()}
        return ConversionReport(**values)
