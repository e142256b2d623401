"""The hidden states between two decoder layers, in a file: calibration holds one batch of them in memory.

Plain float32, [samples, length, hidden], row-major, no header: the file lives only while a checkpoint is quantized.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

# Of a batch: about as many as the model is wide, so that activations take what a layer's weights take. More would gain
# nothing but where experts are read anew for each batch, which are those of wide models.
FEWEST_TOKENS, MOST_TOKENS = 256, 2048


class HiddenStates:
    """The states of all samples before one layer."""

    def __init__(self, path: Path, samples: int, length: int, hidden: int) -> None:
        self.path, self.samples, self.length, self.hidden = path, samples, length, hidden

    @property
    def nbytes(self) -> int:
        return self.samples * self.length * self.hidden * 4

    def spans(self) -> list[tuple[int, int]]:
        """Samples [start, stop) of each batch; the same in every run, since batched products round by batch."""
        step = max(1, min(MOST_TOKENS, max(FEWEST_TOKENS, self.hidden)) // self.length)
        return [(start, min(start + step, self.samples)) for start in range(0, self.samples, step)]

    def batches(self) -> Iterator[Tensor]:
        """float32 [B, length, hidden] of each span."""
        if self.path.stat().st_size != self.nbytes:
            raise QuantizationError(f"{self.path} has {self.path.stat().st_size} bytes, not {self.nbytes}")
        with open(self.path, "rb") as file:
            for start, stop in self.spans():
                count = (stop - start) * self.length * self.hidden
                flat = np.fromfile(file, dtype=np.float32, count=count)
                yield torch.from_numpy(flat).view(stop - start, self.length, self.hidden)

    def write(self, batches: Iterator[Tensor]) -> None:
        """The batches of all spans, in order."""
        with self.writer() as write:
            for batch in batches:
                write(batch)

    @contextmanager
    def writer(self) -> Iterator[Callable[[Tensor], None]]:
        """What takes the batches of all spans, one call each, in order."""
        with open(self.path, "wb") as file:
            yield partial(_write, file)


def _write(file: BinaryIO, batch: Tensor) -> None:
    file.write(batch.contiguous().view(-1).view(torch.uint8).numpy().data)
