"""Weights through a small buffer: checked for NaN and infinity, cast, and what the cast lost counted.

Chunks of a megabyte stay in the processor's second-level cache from the check to the write, and memory does not grow
with the tensor. A 16-bit float's magnitude orders as its bits without the sign do (IEEE 754-2019 §3.4; bfloat16 is
the upper half of a binary32), so that two integer maxima find the largest magnitude, and with it NaN and infinity,
without decoding anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.tensors import DTYPES, RawTensor
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 19
# type -> (unsigned and signed integers of its width, bits of infinity)
FLOATS: dict[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "F16": (np.uint16, np.int16, 0x7C00),
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F32": (np.uint32, np.int32, 0x7F800000),
}


@dataclass(slots=True)
class Losses:
    """What casting a tensor lost: elements beyond the target's range, the largest of them, non-zeros made zero."""

    overflow: int = 0
    largest: float = 0.0
    underflow: int = 0


class Caster:
    """Casts tensors to one type, chunk by chunk through its own buffers; `clip` saturates what is out of range."""

    def __init__(self, target: str, *, clip: bool) -> None:
        """`target` is a key of FLOATS."""
        import torch

        self.target, self.clip = target, clip
        self._torch = torch
        self._out: torch.Tensor = torch.empty(CHUNK_ELEMENTS, dtype=getattr(torch, DTYPES[target][1]))
        self._wide = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32)
        unsigned = FLOATS[target][0]
        self._out_bits = self._out.view(torch.uint8).numpy().view(unsigned)
        self._magnitude = np.empty(CHUNK_ELEMENTS, unsigned)
        self._limit = float(torch.finfo(self._out.dtype).max)
        self._limit_bits = {source: _floor_bits(self._limit, source) for source in FLOATS}

    def run(self, name: str, tensor: RawTensor, losses: Losses) -> Iterator[npt.NDArray[Any]]:
        """Yields the cast bytes piece by piece, each valid until the next, and adds to `losses`.

        The same type passes through as views. Raises CheckpointError for NaN and infinity, naming tensor and index, and
        for types that are no plain float.
        """
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} is {tensor.dtype}; weights are read from {', '.join(FLOATS)}",
                hint="convert the checkpoint to 16-bit floats first",
            )
        bits = tensor.data.view(FLOATS[tensor.dtype][0])
        values = tensor.to_torch().reshape(-1)
        return self._run(values, bits, tensor.dtype, losses, lambda start: _refuse_non_finite(name, tensor, start))

    def run_values(self, name: str, tiles: Iterator[torch.Tensor], losses: Losses) -> Iterator[npt.NDArray[Any]]:
        """As `run`, for float32 values that come tile by tile: dequantized, never stored. Raises CheckpointError for
        what is not finite."""
        for tile in tiles:
            values = tile.reshape(-1)
            bits = values.numpy().view(np.uint32)
            yield from self._run(values, bits, "F32", losses, lambda _: _refuse_product(name))

    def _run(
        self,
        values: torch.Tensor,
        bits: npt.NDArray[Any],
        dtype: str,
        losses: Losses,
        refuse: Callable[[int], NoReturn],
    ) -> Iterator[npt.NDArray[Any]]:
        """`bits` are those of `values`, of type `dtype`; `refuse` is told where a chunk starts that is not finite."""
        infinity = FLOATS[dtype][2]
        for start in range(0, bits.size, CHUNK_ELEMENTS):
            chunk = bits[start : start + CHUNK_ELEMENTS]
            top = _largest_bits(chunk, dtype)
            if top >= infinity:
                refuse(start)
            if dtype == self.target:
                yield chunk
                continue
            largest = _to_float(top, dtype) if top > self._limit_bits[dtype] else None
            yield self._cast(values[start : start + chunk.size], chunk, largest, losses)

    def _cast(
        self, values: torch.Tensor, bits: npt.NDArray[Any], largest: float | None, losses: Losses
    ) -> npt.NDArray[Any]:
        """`largest` is the chunk's largest magnitude, where that is beyond the target's limit."""
        n = values.numel()
        out, out_bits, magnitude = self._out[:n], self._out_bits[:n], self._magnitude[:n]
        # Between the 16-bit types by way of float32, which is exact: torch does each half a register at a time, and the
        # direct way number by number, in three times the time.
        out.copy_(values if values.dtype is self._wide.dtype else self._wide[:n].copy_(values))
        infinity = FLOATS[self.target][2]
        np.bitwise_and(out_bits, _sign_mask(magnitude.dtype), out=magnitude)
        nonzero = int(np.count_nonzero(magnitude))
        if nonzero < n:
            losses.underflow += int(np.count_nonzero(bits & _sign_mask(bits.dtype))) - nonzero
        if largest is not None:  # rounding may still bring it back to the limit, so count what became infinite
            overflow = int(np.count_nonzero(magnitude >= infinity))
            losses.overflow += overflow
            losses.largest = max(losses.largest, largest if overflow else 0.0)
            if self.clip:
                out.clamp_(-self._limit, self._limit)
        return out_bits


def _largest_bits(bits: npt.NDArray[Any], dtype: str) -> int:
    """The bits, without sign, of the element of largest magnitude."""
    signed = FLOATS[dtype][1]
    sign = 1 << (8 * bits.itemsize - 1)
    positive = int(bits.view(signed).max())  # negative where there is no positive element
    negative = int(bits.max())
    return max(positive, negative - sign if negative >= sign else 0, 0)


def _sign_mask(dtype: np.dtype[Any]) -> Any:
    return dtype.type(np.iinfo(dtype).max >> 1)


def _to_float(bits: int, dtype: str) -> float:
    raw = np.array([bits], FLOATS[dtype][0])
    return float(RawTensor(dtype, (1,), raw.view(np.uint8)).to_torch())


def _floor_bits(value: float, dtype: str) -> int:
    """The bits of the largest number of a type that does not exceed a positive `value`."""
    import torch

    nearest = torch.tensor([value]).to(getattr(torch, DTYPES[dtype][1]))
    bits = int(RawTensor.from_torch(nearest).data.view(FLOATS[dtype][0])[0])
    return bits - 1 if float(nearest) > value else bits


def _refuse_product(name: str) -> NoReturn:
    raise CheckpointError(
        f"{name} is not finite once it is multiplied by its scales",
        hint="the weights are damaged; no model has such a value: copy them again",
    )


def _refuse_non_finite(name: str, tensor: RawTensor, start: int) -> NoReturn:
    unsigned, _, infinity = FLOATS[tensor.dtype]
    chunk = tensor.data.view(unsigned)[start : start + CHUNK_ELEMENTS]
    magnitude = chunk & _sign_mask(chunk.dtype)
    offset = int(np.argmax(magnitude >= infinity))
    index = [int(i) for i in np.unravel_index(start + offset, tensor.shape)]
    what = "infinite" if int(magnitude[offset]) == infinity else "NaN"
    raise CheckpointError(
        f"{name} is {what} at {index}", hint="the weights are damaged; no model has such a value: copy them again"
    )
