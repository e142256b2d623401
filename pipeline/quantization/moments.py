"""Second moments of what linears read, H = mean(x·xᵀ): all that GPTQ has to know of the data.

Linears with one input share one H, summed while calibration streams. Experts have one each, of the tokens that the
router sent them: 256 of those 7168 wide would be 53 GB, so the layer's expert input lies in a file once, with the
routing, and an expert's H is made when that expert is written.

Shapes: T tokens of all samples, I input features, k experts per token, n tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization.threads import single_threaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

# Of H's mean diagonal, added to its diagonal: the paper's 1%. Raised tenfold where H is not positive even so.
DAMPING = 0.01
CHUNK = 4096  # rows of the experts' input in memory at a time


@dataclass(slots=True)
class MomentSum:
    """Sums x·xᵀ over batches."""

    total: Tensor | None = None
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """`x` float32 [n, I]."""
        if self.total is None:
            self.total = torch.zeros(x.shape[1], x.shape[1])
        self.total.addmm_(x.T, x)
        self.tokens += x.shape[0]

    def finish(self) -> Tensor:
        """float32 [I, I]."""
        if self.total is None:
            raise QuantizationError("second moments of no tokens")
        return self.total / self.tokens


@dataclass(slots=True)
class ExpertInputs:
    """A routed layer's input [T, I] in a file, and the experts of each token."""

    path: Path
    _width: int = 0
    _chosen: list[Tensor] = field(default_factory=list)
    _file: BinaryIO | None = None

    def add(self, x: Tensor, chosen: Tensor) -> None:
        """`x` [n, I], `chosen` int64 [n, k]; in order of the tokens."""
        if self._file is None:
            self._width = x.shape[1]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb")  # noqa: SIM115 - held between batches
        self._file.write(x.float().contiguous().numpy().data)
        self._chosen.append(chosen.to(torch.int16))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def rows(self, expert: int | None) -> Iterator[Tensor]:
        """float32 [at most CHUNK, I] of the tokens sent to `expert`, or of all."""
        chosen = torch.cat(self._chosen)
        tokens = torch.arange(len(chosen)) if expert is None else (chosen == expert).any(dim=1).nonzero().squeeze(1)
        # Mapped anew each time: pages that were read do not add up.
        inputs = np.memmap(self.path, dtype=np.float32, mode="r", shape=(len(chosen), self._width))
        for part in torch.split(tokens, CHUNK):
            yield torch.from_numpy(inputs[part.numpy()])


@dataclass(frozen=True, slots=True)
class Moment:
    """An H [I, I] not made yet. Two of one `key` are the same, within a layer."""

    key: str
    make: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Factor:
    """H of a (scaled) input, `order`: its columns with the largest diagonal first, and `upper`: the upper Cholesky
    factor of its inverse, [I, I] in that order."""

    moment: Tensor
    order: Tensor
    upper: Tensor

    def weights(self, group: int) -> Tensor:
        """What an error of each weight costs, [I/g, g]."""
        return self.moment.diagonal().reshape(-1, group)

    def error(self, difference: Tensor) -> float:
        """Mean squared output, summed over output features, of a weight [O, I]."""
        return float(torch.sum((difference @ self.moment).mul_(difference), dtype=torch.float64))


class Factors:
    """Factors as they are asked for. Only the last is held: linears that read one input are written one after the
    other."""

    def __init__(self) -> None:
        self._of: tuple[str, Tensor | None] | None = None
        self._last: Factor | None = None

    def get(self, moment: Moment, scale: Tensor | None) -> Factor:
        """The factor for inputs divided by `scale` [I]."""
        known = self._of
        if self._last is None or known is None or known[0] != moment.key or known[1] is not scale:
            self._last = None  # before the next is made
            h = moment.make()
            self._last = factorize(h if scale is None else h / torch.outer(scale, scale))
            self._of = (moment.key, scale)
        return self._last


def factorize(moment: Tensor, damping: float = DAMPING) -> Factor:
    """Raises QuantizationError where H is not finite. Channels without input count as ones of the mean input."""
    diagonal = moment.diagonal()
    if not torch.isfinite(diagonal).all():
        raise QuantizationError(
            "second moments of the activations are NaN or infinite",
            hint="the checkpoint's weights are damaged, or were converted to a type that they overflow",
        )
    mean = float(diagonal.mean()) or 1.0
    order = diagonal.argsort(descending=True, stable=True)
    damped = moment[order][:, order]
    silent = damped.diagonal() == 0
    damped.diagonal().add_(silent * mean)
    with single_threaded():
        while True:
            damped.diagonal().add_(damping * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return Factor(moment, order, upper)
            damping *= 10
