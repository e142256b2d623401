"""INT4 in groups: constants in TensorRT's layout, which its dequantization fuses into the GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES
from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.network.derived import Derived
from pipeline.network.graph import Graph
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.prescale import lower_prescale
from pipeline.network.weights.source import Weights
from pipeline.network.weights.steps import lower_input_step

_WORD = 8  # bytes
_STRIP = 128  # rows transposed at a time: the columns written stay in the cache until their lines are full


def lower(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [in, out] with one scale per group of inputs, and AWQ's scale of the input where that was not folded
    (arXiv 2306.00978, §3.2). Raises CompatibilityError for a stack of several group sizes."""
    linear = Linears(weights, tuple(bases), out_features, in_features, (len(bases),) if stacked else ())
    prescale = lower_prescale(at, weights, bases, in_features, stacked)
    packed = at.int4("weight", linear.packed())
    scales = at.constant(WEIGHT_SCALES, linear.scales())
    return Operand(weight=at.dequantize("dequantize", packed, scales), transposed=False, prescale=prescale)


def lower_fp8_inputs(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """The same, its input rounded to FP8 (W4A8_AWQ of TensorRT-LLM, whose kernels alone multiply such)."""
    operand = lower(at, weights, bases, out_features, in_features, stacked)
    return replace(operand, step=lower_input_step(at, weights, bases), quantized="fp8")


@dataclass(frozen=True, slots=True)
class Linears:
    """One linear, or several as a stack ([E, …] in front)."""

    weights: Weights
    bases: tuple[str, ...]
    out_features: int
    in_features: int
    stack: tuple[int, ...]

    def packed(self) -> Derived:
        """I8 [in, out/2], pairs along out, low nibble first: the checkpoint's bytes, transposed."""
        for base in self.bases:  # refused now, not when the bytes are made
            self.weights.check(f"{base}.weight", self._packed_shape, dtypes=("I8",))

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            for base in self.bases:
                transposed = np.empty((self.in_features, self.out_features // 2), np.uint8)
                transpose(self._packed_rows(base), transposed)
                yield transposed.reshape(-1)

        return Derived("I8", (*self.stack, self.in_features, self.out_features // 2), pieces)

    def scales(self) -> Derived:
        """[in/group, out] in the model's type."""
        count = self.in_features // self.group()

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            for base in self.bases:
                raw = self.weights.read(f"{base}.{WEIGHT_SCALES}", (self.out_features, count), dtypes=("F32",))
                yield store(raw.data.view(np.float32).reshape(raw.shape).T, self.weights.dtype, base)

        for base in self.bases:
            self.weights.check(f"{base}.{WEIGHT_SCALES}", (self.out_features, count), dtypes=("F32",))
        return Derived(MODEL_DTYPES[self.weights.dtype], (*self.stack, count, self.out_features), pieces)

    def group(self) -> int:
        """Inputs of one scale. Raises CompatibilityError where linears of a stack have several."""
        groups = {self._group(base) for base in self.bases}
        if len(groups) > 1:
            raise CompatibilityError(
                f"experts of {self.bases[0].rsplit('.', 2)[0]} have the group sizes {sorted(groups)}",
                hint="quantize the experts of one layer with one group_size",
            )
        return groups.pop()

    def _group(self, base: str) -> int:
        info = self.weights.source.tensors[f"{base}.{WEIGHT_SCALES}"]
        blocks = info.shape[1] if len(info.shape) == 2 else 0
        fits = info.shape[:1] == (self.out_features,) and blocks > 0 and self.in_features % blocks == 0
        if not fits or self.out_features % 2:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(info.shape)}, which is no "
                f"[{self.out_features}, {self.in_features}/group]",
                hint="quantize the checkpoint again",
            )
        return self.in_features // blocks

    def _packed_rows(self, base: str) -> npt.NDArray[np.uint8]:
        raw = self.weights.read(f"{base}.weight", self._packed_shape, dtypes=("I8",))
        return raw.data.reshape(self._packed_shape)

    @property
    def _packed_shape(self) -> tuple[int, int]:
        return self.out_features // 2, self.in_features


def store(scales: npt.NDArray[np.float32], dtype: str, base: str) -> npt.NDArray[np.uint8]:
    """Scales as bytes of the model's type. Raises CheckpointError where that would change a value."""
    scales = np.ascontiguousarray(scales)
    stored: npt.NDArray[np.generic]
    if dtype == "float32":
        stored, back = scales, scales
    elif dtype == "float16":
        # The comparison below catches an overflow.
        with np.errstate(over="ignore"):
            half = scales.astype(np.float16)
        stored, back = half, half.astype(np.float32)
    else:  # bfloat16 is the upper half of a float32
        upper = (scales.view(np.uint32) >> 16).astype(np.uint16)
        stored, back = upper, (upper.astype(np.uint32) << 16).view(np.float32)
    if not np.array_equal(back, scales):
        raise CheckpointError(
            f"tensor {base}.{WEIGHT_SCALES} holds scales that {dtype} cannot represent",
            hint="the checkpoint was quantized for another type: quantize it again",
        )
    return stored.reshape(-1).view(np.uint8)


def transpose(rows: npt.NDArray[np.uint8], into: npt.NDArray[np.uint8]) -> None:
    """Bytes [R, C] → [C, R]. Eight rows become one row of words first, and words are what is scattered: a single byte
    costs as much to move."""
    count, columns = rows.shape
    whole = count - count % _WORD
    if whole:
        words = np.empty((_STRIP // _WORD, columns, _WORD), np.uint8)
        wide = into[:, :whole].view(np.uint64)
        for start in range(0, whole, _STRIP):
            strip = rows[start : min(start + _STRIP, whole)]
            filled = len(strip) // _WORD
            for byte in range(_WORD):
                words[:filled, :, byte] = strip[byte::_WORD]
            first = start // _WORD
            wide[:, first : first + filled] = words[:filled].view(np.uint64)[:, :, 0].T
    into[:, whole:] = rows[whole:].T
