"""Integer weights as TensorRT-LLM's mixed-input GEMM reads them: its `preprocess_weights_for_mixed_gemm`, for 16-bit
activations.

Weights stand in the memory order in which a tensor core's fragments want them, so the order depends on the GPU. The
steps, of a weight of K inputs and N outputs: inputs are permuted within the rows of one MMA instruction; the matrix is
stored output by output; before Hopper, tiles of 64 inputs of neighbouring outputs alternate; at last every value is
made unsigned, and the values of each 32-bit word are ordered so that few instructions make floats of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HOPPER = 90
DATACENTER_BLACKWELL = range(100, 120)  # has no such kernels: the builder refuses integer weights
BLACKWELL = 120  # takes Ampere's order again
TILE = 64  # inputs


@dataclass(frozen=True, slots=True)
class Order:
    """Of weights of `bits`: the inputs of one MMA as they are read, how many outputs alternate before Hopper, and the
    values of a 32-bit word."""

    bits: int
    inputs: tuple[int, ...]
    alternating: int
    word: tuple[int, ...]


ORDERS = {
    8: Order(8, (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15), 2, (0, 2, 1, 3)),
    4: Order(
        4,
        tuple(base + step + pair for base in (0, 2, 4, 6) for step in (0, 8, 16, 24) for pair in (0, 1)),
        4,
        (0, 2, 4, 6, 1, 3, 5, 7),
    ),
}


def process(q: npt.NDArray[np.int8], bits: int, sm: int, *, name: str = "weight") -> npt.NDArray[np.uint8]:
    """Signed integers q [K, N] of 4 or 8 `bits` to the bytes of the processed weight, one-dimensional, K * N * bits / 8
    of them. Raises CompatibilityError, naming `name`, for a GPU or a shape without such kernels."""
    import numpy as np

    order, (inputs, outputs) = ORDERS[bits], q.shape
    if sm in DATACENTER_BLACKWELL:
        raise CompatibilityError(
            f"{name}: TensorRT-LLM builds no INT{bits} weights for SM{sm}", hint="use method fp8, or another GPU"
        )
    if inputs % TILE or outputs % TILE:
        raise CompatibilityError(
            f"{name}: {inputs} inputs and {outputs} outputs of a rank are not multiples of {TILE}",
            hint="take a smaller tensor parallel size",
        )
    rows = np.arange(inputs).reshape(-1, len(order.inputs))[:, order.inputs].reshape(-1)
    stored = np.ascontiguousarray(q.T[:, rows])  # [N, K]
    if alternates(sm):
        tiles = stored.reshape(outputs // order.alternating, order.alternating, inputs // TILE, TILE)
        stored = np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))
    unsigned = (stored.reshape(-1, len(order.word)).astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    words = unsigned[:, order.word]
    if bits == 4:
        np.bitwise_or(words[:, 0::2], np.left_shift(words[:, 1::2], 4), out=words[:, 0::2])
        words = words[:, 0::2]
    return np.ascontiguousarray(words).reshape(-1)


def alternates(sm: int) -> bool:
    """Whether tiles of neighbouring outputs alternate on this GPU."""
    return sm < HOPPER or sm >= BLACKWELL
