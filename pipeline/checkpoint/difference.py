"""Two checkpoints tensor by tensor: what was added, removed, retyped, reshaped, and how far values are apart.

Streamed in pieces of a few megabytes from both mappings, so that memory does not grow with the checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import find_format
from pipeline.checkpoint.tensors import DTYPES
from pipeline.progress import SILENT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.progress import Progress

    Bytes = npt.NDArray[np.uint8]
    Values = npt.NDArray[np.floating[Any]]

PIECE = 1 << 20  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that is in both. `before` and `after` are spelled "F16[2, 3]", INT4 as what is packed.

    `changed` counts elements of other bits (of other value, where the type changed too); `largest` is the largest
    difference of values, in quantization steps for INT4, None where a value is NaN on one side only. Both are None
    where shapes differ.
    """

    name: str
    before: str
    after: str
    elements: int
    changed: int | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """`retyped` may have other values as well; `changed` have the same type and shape."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    retyped: list[TensorChange] = field(default_factory=list)
    reshaped: list[TensorChange] = field(default_factory=list)
    changed: list[TensorChange] = field(default_factory=list)
    same: int = 0

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.retyped or self.reshaped or self.changed)


def compare_tensors(a: CheckpointFolder, b: CheckpointFolder, progress: Progress = SILENT) -> TensorDifference:
    """From `a` to `b`. Reads every tensor that both have in one shape."""
    common = [name for name in a.tensors if name in b.tensors]
    progress.start("comparing", sum(a.tensors[name].nbytes for name in common), "B")
    retyped, reshaped, changed = [], [], []
    for name in common:
        one, other = a.tensors[name], b.tensors[name]
        change = _compare(a, b, one, other)
        if one.shape != other.shape:
            reshaped.append(change)
        elif one.dtype != other.dtype:
            retyped.append(change)
        elif change.changed:
            changed.append(change)
        progress.advance(one.nbytes)
    return TensorDifference(
        added=[name for name in b.tensors if name not in a.tensors],
        removed=[name for name in a.tensors if name not in b.tensors],
        retyped=retyped,
        reshaped=reshaped,
        changed=changed,
        same=len(common) - len(retyped) - len(reshaped) - len(changed),
    )


def _compare(a: CheckpointFolder, b: CheckpointFolder, one: TensorInfo, other: TensorInfo) -> TensorChange:
    packed = _is_packed(a, one), _is_packed(b, other)
    change = TensorChange(
        name=one.name,
        before=_spell(one, packed[0]),
        after=_spell(other, packed[1]),
        elements=_count(one, packed[0]),
    )
    if one.shape != other.shape or packed[0] != packed[1]:
        return change
    left, right = a.read(one.name).data, b.read(other.name).data
    widths = DTYPES[one.dtype][0], DTYPES[other.dtype][0]
    decode = _unpack if packed[0] else _decode
    changed, largest = 0, 0.0
    for start in range(0, left.size // widths[0], PIECE):
        pieces = [x[start * width : (start + PIECE) * width] for x, width in zip((left, right), widths, strict=True)]
        count, distance = _measure(pieces[0], pieces[1], one.dtype, other.dtype, decode)
        changed += count
        largest = largest + distance if math.isnan(largest + distance) else max(largest, distance)
        for folder, width in ((a, widths[0]), (b, widths[1])):
            folder.release(one.name, start * width, (start + PIECE) * width)
    return replace(change, changed=changed, largest=None if math.isnan(largest) else largest)


def _measure(
    left: Bytes, right: Bytes, one: str, other: str, decode: Callable[[Bytes, str], Values]
) -> tuple[int, float]:
    """How many elements of a piece differ, and by how much at most; NaN where one side alone is NaN."""
    import numpy as np

    if one == other and np.array_equal(left, right):
        return 0, 0.0
    x, y = decode(left, one), decode(right, other)
    if one == other and decode is _decode:
        bits = np.dtype(f"u{DTYPES[one][0]}")
        differ = left.view(bits) != right.view(bits)
    else:
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(x[differ].astype(np.float64) - y[differ].astype(np.float64))
    distance[np.isnan(x[differ]) & np.isnan(y[differ])] = 0.0  # two NaNs of other bits; so are two infinities
    distance[x[differ] == y[differ]] = 0.0
    return int(np.count_nonzero(differ)), float(distance.max(initial=0.0))


def _decode(data: Bytes, dtype: str) -> Values:
    """A piece's values as floats that hold them exactly (int64 beyond 2^53 aside)."""
    import numpy as np

    if dtype == "BF16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _decode_e4m3(np.arange(256, dtype=np.uint8))[data]
    values: Values = data.view(np.dtype(DTYPES[dtype][1])).astype(np.float64)
    return values


def _decode_e4m3(data: Bytes) -> Values:
    """arXiv 2209.05433 §3.1: four bits of exponent, biased by 7, three of mantissa; NaN where all are set."""
    import numpy as np

    exponent, mantissa = (data >> 3 & 15).astype(np.int32), (data & 7).astype(np.float32)
    magnitude = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    magnitude[(data & 127) == 127] = np.nan
    signed: Values = np.where(data & 128, -magnitude, magnitude).astype(np.float32)
    return signed


def _unpack(data: Bytes, _: str) -> Values:
    """INT4 values, two of a byte, in steps of their group's scale."""
    import numpy as np

    low, high = (data & 15).astype(np.int8), (data >> 4).astype(np.int8)
    both = np.stack([low, high], axis=-1).reshape(-1)
    values: Values = np.where(both > 7, both - 16, both).astype(np.float32)
    return values


def _is_packed(folder: CheckpointFolder, info: TensorInfo) -> bool:
    return info.name.endswith(".weight") and find_format(folder.tensors, info.name.removesuffix(".weight")) == "int4"


def _count(info: TensorInfo, packed: bool) -> int:
    elements = info.nbytes // DTYPES[info.dtype][0]
    return 2 * elements if packed else elements


def _spell(info: TensorInfo, packed: bool) -> str:
    if not packed:
        return f"{info.dtype}{list(info.shape)}"
    rows, *rest = info.shape
    return f"INT4{[2 * rows, *rest]}"
