"""quantization.json: what became of every linear and every expert, and what it saved; and what config.json says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.config_values import spell
from pipeline.checkpoint.layouts.scales import PRESCALE, ZEROS
from pipeline.errors import CheckpointError
from pipeline.quantization.catalog import FORMATS, GROUP_SIZES, METHODS
from pipeline.quantization.kv_cache import CACHE_FORMATS

if TYPE_CHECKING:
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.quantization.rules import Linear
    from pipeline.quantization.settings import QuantizeSettings

REPORT = "quantization.json"
DERIVED = ("ratio", "linears_ratio", "heat_map")  # of its keys, those that follow from the others
BYTES_16BIT = 2
# Of a linear's row, what is looked up in a table: the file may be of another version's, or edited.
KNOWN: Mapping[str, Callable[[Mapping[str, Any]], tuple[object, ...]]] = {
    "method": lambda row: tuple(METHODS),
    "format": lambda row: tuple(FORMATS),
    "group_size": lambda row: GROUP_SIZES if FORMATS[row["format"]].grouped else (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """`linears`: by name, what was done (`method`: of an expert with too few tokens to measure rtn, to nearest in its
    format, or the method of the scale that it shares), group size, how many weights in how many bytes (scales and
    vector included), alpha, where the scale went, whether clipped, output error before and after.

    `unquantized`: the other weight matrices, with the reason. `experts`: by routed layer, calibration tokens per expert
    and the policy applied to those with too few. `coverage`: whether the text says enough, see coverage.py. Losses are
    squared output error over squared output on the sampled calibration rows, or null where nothing was measured.
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
    coverage: dict[str, Any]
    bytes_before: int
    bytes_after: int

    @property
    def ratio(self) -> float:
        """Of the whole checkpoint, size after over size before."""
        return self.bytes_after / self.bytes_before

    @property
    def linears_ratio(self) -> float:
        """Of the linears that were quantized alone, over their size in 16 bits."""
        rows = self.linears.values()
        stored, weights = (sum(int(row[key]) for row in rows) for key in ("bytes", "weights"))
        return stored / (BYTES_16BIT * weights)

    @property
    def heat_map(self) -> list[dict[str, Any]]:
        """How large the outputs' errors are: a row per layer and scale group, the groups of a layer's experts as one,
        but a row of its own for each method and group size among them.

        layer: null of the head, which is behind them; group: the linear that names it, relative to the layer, experts
        as "*"; linears: how many; method; format; group_size: null in formats without; alpha: the mean of those that
        have one; clipped: the share of the linears; loss_before and loss_after: the mean of the linears' losses, null
        where nothing was measured.
        """
        cells: dict[tuple[int | None, str, str, int | None], list[dict[str, Any]]] = {}
        for row in self.linears.values():
            found = re.search(r"\.layers\.(\d+)\.(.*)", row["scale_group"])
            layer, group = (int(found[1]), found[2]) if found else (None, row["scale_group"])
            place = re.sub(r"\.experts\.\d+\.", ".experts.*.", group)
            cells.setdefault((layer, place, row["method"], row["group_size"]), []).append(row)
        return [
            {
                "layer": layer,
                "group": group,
                "linears": len(rows),
                "method": method,
                "format": rows[0]["format"],
                "group_size": group_size,
                "alpha": _average(rows, "alpha"),
                "clipped": sum(row["clipped"] for row in rows) / len(rows),
                "loss_before": _average(rows, "loss_before"),
                "loss_after": _average(rows, "loss_after"),
            }
            for (layer, group, method, group_size), rows in cells.items()
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "quant_algo": self.quant_algo,
            "group_size": self.group_size,
            "calibration": self.calibration,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "ratio": round(self.ratio, 6),
            "linears_ratio": round(self.linears_ratio, 6),
            "smaller_groups": self.smaller_groups,
            "idle_patterns": self.idle_patterns,
            "coverage": self.coverage,
            "heat_map": self.heat_map,
            "experts": self.experts,
            "linears": self.linears,
            "unquantized": self.unquantized,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> QuantizationReport:
        """What `write` wrote. Raises CheckpointError, naming the file, for anything else, and for linears of a method,
        format or group size that this version has not."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: value for key, value in values.items() if key not in DERIVED}
            report = QuantizationReport(**kept)
            rows = {name: {key: row[key] for key in KNOWN} for name, row in report.linears.items()}
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(
                f"{path} is not what the quantize stage writes", hint="the file is damaged: run that stage again"
            ) from error
        for name, row in rows.items():
            for key in row:
                known = KNOWN[key](row)
                if row[key] not in known:
                    raise CheckpointError(
                        f"{path}: linears: {name}: {key} is {spell(row[key])}; this version knows "
                        f"{', '.join(map(str, known))}",
                        hint="use the version of trtseek that wrote it, or run the quantize stage again with this one",
                    )
        return report


def _average(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(f"{sum(values) / len(values):.4g}") if values else None


def describe_config(
    settings: QuantizeSettings, quant_algo: str, linears: Mapping[str, Linear], infos: Sequence[TensorInfo]
) -> dict[str, Any]:
    """What config.json says of it, under our key. `infos`: all tensors that were written."""
    return {
        "quant_algo": quant_algo,
        "kv_cache_quant_algo": CACHE_FORMATS[kind][0] if (kind := settings.kv_cache) != "none" else None,
        "method": settings.method,
        "group_size": settings.group_size if any(linear.group for linear in linears.values()) else None,
        "has_zero_point": any(info.name.endswith(f".{ZEROS}") for info in infos),
        "pre_quant_scale": any(info.name.endswith(PRESCALE) for info in infos),
        "quantized": {name: {"format": x.format, "group_size": x.group} for name, x in linears.items()},
    }
