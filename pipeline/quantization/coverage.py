"""Whether calibration text says enough: what more of it would still change in the statistics that scales are made of.

Per input of a layer, over its I channels, with p = mean|x| / sum of mean|x| (and the same of max|x|):

- entropy: -sum p ln p / ln I. 1 where all channels are alike; low where a few outliers carry all, and scales matter.
- agreement: the correlation of ln mean|x| between the even and the odd samples. Halves that are both typical agree.
- change: how far the AWQ scale of alpha 1/2, sqrt(mean|x|), moved between half of the samples and all of them: the root
  mean square over channels of its relative change, the mean of both halves. Statistics of independent samples settle
  like 1/sqrt(n), so doubling the text would change scales by about change / sqrt(2).
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
SILENT = 1e-6  # channels below this share of the mean channel count as this loud


@dataclass(slots=True)
class Spread:
    """Sums |x| of the even and the odd samples apart. `length`: tokens of a sample."""

    length: int
    _sums: list[Tensor] = field(default_factory=list)
    _peaks: list[Tensor] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, x: Tensor, positions: Tensor) -> None:
        """`x` [n, I] of the tokens at `positions` [n] of all samples one after the other."""
        magnitudes = x.abs()
        if not self._sums:
            self._sums = [torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(2)]
            self._peaks = [torch.zeros(x.shape[1]) for _ in range(2)]
        odd = (positions // self.length) % 2 == 1
        for half, rows in enumerate((magnitudes[~odd], magnitudes[odd])):
            if rows.shape[0]:
                self._sums[half] += rows.sum(0, dtype=torch.float64)
                self._peaks[half] = torch.maximum(self._peaks[half], rows.amax(0).float())
                self._tokens[half] += rows.shape[0]

    def finish(self) -> dict[str, float] | None:
        """The figures above; None where a half saw nothing."""
        if not all(self._tokens):
            return None
        total = (self._sums[0] + self._sums[1]) / sum(self._tokens)
        floor = float(total.mean()) * SILENT or 1.0  # of an input that is zero throughout
        halves = [(sums / count).clamp(min=floor) for sums, count in zip(self._sums, self._tokens, strict=True)]
        whole, peaks = total.clamp(min=floor), torch.maximum(self._peaks[0], self._peaks[1]).double()
        changes = [float((whole / half).sqrt().sub(1).square().mean().sqrt()) for half in halves]
        tops = [max(float(peak.max()), 1e-30) for peak in self._peaks]
        entropy, change = _entropy(whole), sum(changes) / 2
        figures = {
            "score": entropy * max(0.0, 1 - change),
            "entropy": entropy,
            "peak_entropy": _entropy(peaks.clamp(min=1e-30)),
            "agreement": _correlate(halves[0].log(), halves[1].log()),
            "change": change,
            "peak_change": sum(max(tops) / top - 1 for top in tops) / 2,
        }
        return {key: _round(value) for key, value in figures.items()}


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
    change, and those that more text would change."""
    rows = [(layer, name, row) for layer, inputs in layers.items() for name, row in inputs.items()]
    changing = [(layer, name) for layer, name, row in rows if row["change"] > CHANGED]
    return {
        "score": min((row["score"] for _, _, row in rows), default=None),
        "change": max((row["change"] for _, _, row in rows), default=None),
        "threshold": CHANGED,
        "changing": [f"{layer}.{name}" for layer, name in changing],
        "layers": layers,
    }


def warn(coverage: Mapping[str, Any]) -> str | None:
    """What to tell the user; None where the text is enough."""
    changing: Sequence[str] = coverage["changing"]
    if not changing:
        return None
    count = sum(len(inputs) for inputs in coverage["layers"].values())
    return (
        f"more calibration text would change the scales: between half of the samples and all of them those of "
        f"{len(changing)} of {count} inputs moved by more than {coverage['threshold']:.0%}, at most by "
        f"{coverage['change']:.1%} (first: layer {changing[0]}); raise stages.quantize.calibration.samples"
    )
