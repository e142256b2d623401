"""Hidden states between two slices of a network: in memory while they are small, in a file beyond.

The file has no name, so that nothing is left of it however the process ends; what was written to it counts as the
system's cache, not as the process's memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.errors import StoreError

if TYPE_CHECKING:
    import torch

IN_MEMORY = 256 << 20  # bytes


class Activations:
    """`rows[i]` rows of `width` elements for step i; each step's are replaced by what the next slice makes of them."""

    def __init__(self, rows: Sequence[int], width: int, *, folder: Path | None = None, limit: int = IN_MEMORY) -> None:
        """`folder`: where a file goes once more than `limit` bytes are to be held; None: where the system has
        temporary files (TMPDIR)."""
        self._starts = [0, *accumulate(rows)]
        self._width, self._folder, self._limit = width, folder, limit
        self._held: dict[int, torch.Tensor] = {}
        self._file: IO[bytes] | None = None
        self._dtype: torch.dtype | None = None

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def put(self, step: int, states: torch.Tensor) -> None:
        """Keeps [rows, width] of one step. Raises StoreError where the disk is full."""
        if self._file is None and self._starts[-1] * self._width * states.element_size() <= self._limit:
            self._held[step] = states
            return
        import torch

        self._dtype = states.dtype
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (lives as long as this does)
            self._file.seek(self._starts[step] * self._width * states.element_size())
            self._file.write(states.contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            where = self._folder or Path(tempfile.gettempdir())
            raise StoreError(
                f"{where}: {error.strerror}, while hidden states of {self._starts[-1]} tokens were kept",
                hint="set TMPDIR to a folder with more room, or take fewer tokens",
            ) from error

    def get(self, step: int) -> torch.Tensor:
        """What `put` was given for this step."""
        if self._file is None:
            return self._held[step]
        import torch

        assert self._dtype is not None  # put comes first
        size = torch.empty((), dtype=self._dtype).element_size()
        count = (self._starts[step + 1] - self._starts[step]) * self._width
        self._file.seek(self._starts[step] * self._width * size)
        data = bytearray(self._file.read(count * size))
        return torch.frombuffer(data, dtype=self._dtype).view(-1, self._width)

    def close(self) -> None:
        self._held.clear()
        if self._file is not None:
            self._file.close()
