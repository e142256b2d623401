"""Constants whose bytes are not the checkpoint's own: transposed, stacked, split; made when wanted, in pieces.

A stack of V3's experts is 2 GB in INT4 and 8 GB in 16 bits. Whoever holds it pays that; whoever only looks at its bytes
(a digest) pays for one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import DTYPES, RawTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor to be: `pieces` makes its bytes, in order, each a contiguous one-dimensional array, anew at every call.

    Shapes and types were checked when it was described; only values can still be refused (CheckpointError).
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[npt.NDArray[np.uint8]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]

    def make(self) -> RawTensor:
        """The whole of it. A constant of one piece is that piece; others are copied together."""
        import numpy as np

        data: npt.NDArray[np.uint8] | None = None
        done = 0
        for piece in self.pieces():
            if data is None:
                data = piece if piece.size == self.nbytes else np.empty(self.nbytes, np.uint8)
            if data is not piece:
                data[done : done + piece.size] = piece
            done += piece.size
        if data is None or done != self.nbytes:
            raise ValueError(f"{done} bytes were made for {self.dtype}{list(self.shape)}")  # a mistake of the writer
        return RawTensor(self.dtype, self.shape, data)


Constant = RawTensor | Derived
