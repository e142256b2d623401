"""Whether calibration text says enough: what more of it would still change in the statistics that scales are made of.

Per input of a layer, over its I channels, with p = mean|x| / sum of mean|x| (and the same of max|x|):

- entropy: -sum p ln p / ln I. 1 where all channels are alike; low where a few outliers carry all, and scales matter.
- agreement: the correlation of ln mean|x| between the even and the odd samples. Halves that are both typical agree.
- change: how far the AWQ scale of alpha 1/2, sqrt(mean|x|), moved between half of the samples and all of them: the root
  mean square over channels of its relative change, the mean of both halves. Statistics of independent samples settle
  like 1/sqrt(n), so doubling the text would change scales by about change / sqrt(2).
- change_of_eighth, change_of_quarter: the same between an eighth and a quarter of the samples and all, the mean of all
  eighths and quarters: how the scales settled as samples were added. Of independent samples 2.6 and 1.7 times change.
- peak_change: how much larger the largest |x| of all samples is than that of a half, the mean of both: what a static
  range of activations would have cut off.
- score: entropy of the mean times (1 - change), between 0 and 1: low where text is thin or a few channels are all it
  shows. Compare scores of two texts on one model, not of two models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHANGED = 0.05  # of a scale: about what the choice of alpha in steps of 1/20 leaves open
PARTS = 8
SHARES = {"change_of_eighth": 8, "change_of_quarter": 4}
SILENT = 1e-6  # channels below this share of the mean channel count as this loud


@dataclass(slots=True)
class Spread:
    """Sums |x| of every eighth sample apart. `length`: tokens of a sample."""

    length: int
    _sums: list[Tensor] = field(default_factory=list)
    _peaks: list[Tensor] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=lambda: [0] * PARTS)

    def add(self, x: Tensor, positions: Tensor) -> None:
        """`x` [n, I] of the tokens at `positions` [n] of all samples one after the other."""
        magnitudes = x.abs()
        if not self._sums:
            self._sums = [torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(PARTS)]
            self._peaks = [torch.zeros(x.shape[1]) for _ in range(PARTS)]
        samples = (positions // self.length) % PARTS
        for part in set(samples.tolist()):
            rows = magnitudes[samples == part]
            self._sums[part] += rows.sum(0, dtype=torch.float64)
            torch.maximum(self._peaks[part], rows.amax(0).float(), out=self._peaks[part])
            self._tokens[part] += rows.shape[0]

    def finish(self) -> dict[str, float] | None:
        """The figures above, but for those of shares of which one saw nothing; None where a half did not."""
        if not (sum(self._tokens[0::2]) and sum(self._tokens[1::2])):
            return None
        total = torch.stack(self._sums).sum(0) / sum(self._tokens)
        floor = float(total.mean()) * SILENT or 1.0  # of an input that is zero throughout
        whole, halves = total.clamp(min=floor), self._means(2, floor)
        tops = [max(float(torch.stack(self._peaks[half::2]).max()), 1e-30) for half in range(2)]
        peaks = torch.stack(self._peaks).amax(0).double()
        entropy, change = _entropy(whole), _change(whole, halves)
        figures = {
            "score": entropy * max(0.0, 1 - change),
            "entropy": entropy,
            "peak_entropy": _entropy(peaks.clamp(min=1e-30)),
            "agreement": _correlate(halves[0].log(), halves[1].log()),
            "change": change,
            "peak_change": sum(max(tops) / top - 1 for top in tops) / 2,
        }
        for name, count in SHARES.items():
            if all(sum(self._tokens[part::count]) for part in range(count)):
                figures[name] = _change(whole, self._means(count, floor))
        return {key: _round(value) for key, value in figures.items()}

    def _means(self, count: int, floor: float) -> list[Tensor]:
        """Mean |x| of each of `count` shares of the samples."""
        return [
            (torch.stack(self._sums[part::count]).sum(0) / sum(self._tokens[part::count])).clamp(min=floor)
            for part in range(count)
        ]


def _change(whole: Tensor, shares: Sequence[Tensor]) -> float:
    changes = [float((whole / share).sqrt().sub(1).square().mean().sqrt()) for share in shares]
    return sum(changes) / len(changes)


def _entropy(values: Tensor) -> float:
    if values.numel() < 2:
        return 1.0
    p = values / values.sum()
    return float(-(p * p.clamp(min=1e-300).log()).sum()) / math.log(values.numel())


def _correlate(a: Tensor, b: Tensor) -> float:
    """1 where neither varies."""
    a, b = a - a.mean(), b - b.mean()
    norm = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / norm if norm else 1.0


def _round(value: float) -> float:
    """Three digits: the last bits of a sum depend on the number of threads, and equal runs are to give equal bytes."""
    return float(f"{value:.3g}")


def summarize(layers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """quantization.json's "coverage": `layers` by layer and input, and of all of them the lowest score, the largest
    change, and those that more text would change; `saturation`: as samples are added, how far the scales still were
    from where they ended, over the same inputs each time: those that had the most shares."""
    rows = [(layer, name, row) for layer, inputs in layers.items() for name, row in inputs.items()]
    most = max((len(SHARES.keys() & row.keys()) for _, _, row in rows), default=0)
    settling = [row for _, _, row in rows if len(SHARES.keys() & row.keys()) == most]
    changing = [(layer, name) for layer, name, row in rows if row["change"] > CHANGED]
    return {
        "score": min((row["score"] for _, _, row in rows), default=None),
        "change": max((row["change"] for _, _, row in rows), default=None),
        "threshold": CHANGED,
        "saturation": [
            {"share": 1 / count, "mean": _round(sum(found) / len(found)), "largest": max(found)}
            for name, count in (SHARES | {"change": 2}).items()
            if (found := [row[name] for row in settling if name in row])
        ],
        "changing": [f"{layer}.{name}" for layer, name in changing],
        "layers": layers,
    }


def warn(coverage: Mapping[str, Any], samples: int | None) -> str | None:
    """What to tell the user; None where the text is enough, and where there was none (`samples` None)."""
    if samples == 1:
        return "one sample says nothing about what more would change: raise stages.quantize.calibration.samples"
    changing: Sequence[str] = coverage["changing"]
    if not changing:
        return None
    count = sum(len(inputs) for inputs in coverage["layers"].values())
    return (
        f"more calibration text would change the scales: between half of the samples and all of them those of "
        f"{len(changing)} of {count} inputs moved by more than {coverage['threshold']:.0%}, at most by "
        f"{coverage['change']:.1%} (first: layer {changing[0]}); raise stages.quantize.calibration.samples"
    )
