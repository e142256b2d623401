"""A checkpoint's tensors as the network wants them: checked, in TensorRT's layouts, copied only where they must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.layouts.scales import BLOCK, BLOCK_SCALES, FP8, PRESCALE, WEIGHT_SCALES, count_blocks
from pipeline.checkpoint.tensors import MODEL_DTYPES, RawTensor, TensorSource
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.network.derived import Constant, Derived

_WORD = 8  # bytes
_STRIP = 128  # rows transposed at a time: the columns written stay in the cache until their lines are full


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """One INT4 linear, or a stack of them ([E, …] in front), in TensorRT's layout.

    packed: I8 [in, out/2], pairs along out, low nibble first. scales: [in/group, out] in the model's type.
    prescale: [in] in the model's type, what the input is multiplied by, or None.
    """

    packed: Derived
    scales: Derived
    prescale: Constant | None
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """One linear in FP8 blocks, or a stack of them ([E, …] in front), zeros added where its last blocks are not whole.

    weight: F8_E4M3 [out, in], rounded up to blocks. scales: F32 [blocks of out, blocks of in].
    """

    weight: Constant
    scales: Constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Reads an engine checkpoint for a network of type `dtype`."""

    source: TensorSource
    dtype: str

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def forbid(self, name: str) -> None:
        """Raises CheckpointError if the tensor is there: the network would silently leave it out."""
        if self.has(name):
            raise CheckpointError(
                f"tensor {name} is there, but config.json says that the layer has none",
                hint="config.json and the tensors are of different models",
            )

    def is_int4(self, base: str) -> bool:
        weight = self.source.tensors.get(f"{base}.weight")
        return weight is not None and weight.dtype == "I8" and self.has(f"{base}.{WEIGHT_SCALES}")

    def is_fp8(self, base: str) -> bool:
        """Whether a linear is stored in FP8 blocks."""
        return self.has(f"{base}.{BLOCK_SCALES}")

    def read(self, name: str, shape: Sequence[int], *, dtypes: Sequence[str] = ()) -> RawTensor:
        """The tensor over its file's own memory. Raises CheckpointError if it is missing or of another shape,
        CompatibilityError if of another type than the network's (or than `dtypes`)."""
        info = self.source.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing", hint="convert the checkpoint again")
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} has shape {list(info.shape)}, the architecture says {list(shape)}",
                hint="config.json and the tensors are of different models",
            )
        allowed = tuple(dtypes) or (MODEL_DTYPES[self.dtype],)
        if info.dtype not in allowed:
            raise CompatibilityError(
                f"tensor {name} is {info.dtype}, a {self.dtype} network takes {' or '.join(allowed)}",
                hint="set stages.convert.dtype, or the network's dtype to the checkpoint's",
            )
        return self.source.read(name)

    def read_int4(self, base: str, out_features: int, in_features: int) -> Int4Weight:
        """One INT4 linear, its bytes transposed."""
        group = self._group(base, out_features, in_features)
        return self._int4([base], (), out_features, in_features, group, self._prescale(base, in_features))

    def read_blocks(self, base: str, out_features: int, in_features: int) -> BlockWeight:
        """One linear in FP8 blocks. No copy where its blocks are whole."""
        return self._read_blocks([base], out_features, in_features, ())

    def read_block_stack(self, bases: Sequence[str], out_features: int, in_features: int) -> BlockWeight:
        """Several linears in FP8 blocks as one [E, out, in]. Raises CompatibilityError where only some are."""
        mixed = [base for base in bases if not self.is_fp8(base)]
        if mixed:
            raise CompatibilityError(
                f"{mixed[0]} is not in FP8 but other experts of its layer are",
                hint="set stages.convert.dtype, which multiplies the blocks out",
            )
        return self._read_blocks(bases, out_features, in_features, (len(bases),))

    def _read_blocks(
        self, bases: Sequence[str], out_features: int, in_features: int, stacked: tuple[int, ...]
    ) -> BlockWeight:
        shape, blocks = (out_features, in_features), count_blocks((out_features, in_features))
        rows, columns = (BLOCK * count for count in blocks)
        for base in bases:  # refused now, not when the bytes are made
            weight = self.read(f"{base}.weight", shape, dtypes=(FP8,))
            factors = self.read(f"{base}.{BLOCK_SCALES}", blocks, dtypes=("F32",))
        if not stacked and (rows, columns) == shape:
            return BlockWeight(weight=weight, scales=factors)

        def weights() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                stored = self.read(f"{base}.weight", shape, dtypes=(FP8,)).data
                if (rows, columns) != shape:
                    whole = np.zeros((rows, columns), np.uint8)
                    whole[:out_features, :in_features] = stored.reshape(shape)
                    stored = whole.reshape(-1)
                yield stored

        def scales() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                yield self.read(f"{base}.{BLOCK_SCALES}", blocks, dtypes=("F32",)).data

        return BlockWeight(
            weight=Derived(FP8, (*stacked, rows, columns), weights),
            scales=Derived("F32", (*stacked, *blocks), scales) if stacked else factors,
        )

    def read_stack(self, bases: Sequence[str], out_features: int, in_features: int) -> Derived:
        """The 16-bit weights of several linears as one [E, out, in], which a file holds apart."""
        shape = (out_features, in_features)
        first = self.read(f"{bases[0]}.weight", shape)

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                yield self.read(f"{base}.weight", shape).data

        return Derived(first.dtype, (len(bases), *shape), pieces)

    def read_int4_stack(self, bases: Sequence[str], out_features: int, in_features: int) -> Int4Weight:
        """Several INT4 linears as one [E, in, out]. Raises CompatibilityError where their groups differ, or where only
        some are quantized."""
        mixed = [base for base in bases if not self.is_int4(base)]
        if mixed:
            raise CompatibilityError(
                f"{mixed[0]} is not quantized but other experts of its layer are",
                hint="quantize all routed experts of a layer or none (stages.quantize.include and exclude)",
            )
        groups = {self._group(base, out_features, in_features) for base in bases}
        if len(groups) > 1:
            raise CompatibilityError(
                f"experts of {bases[0].rsplit('.', 2)[0]} have the group sizes {sorted(groups)}",
                hint="quantize the experts of one layer with one group_size",
            )
        prescale = self._prescale_stack(bases, in_features)
        return self._int4(bases, (len(bases),), out_features, in_features, groups.pop(), prescale)

    def _int4(
        self,
        bases: Sequence[str],
        stack: tuple[int, ...],
        out_features: int,
        in_features: int,
        group: int,
        prescale: Constant | None,
    ) -> Int4Weight:
        for base in bases:  # refused now, not when the bytes are made
            self._packed_rows(base, out_features, in_features)
            self._raw_scales(base, out_features, in_features, group)

        def packed() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                transposed = np.empty((in_features, out_features // 2), np.uint8)
                _transpose(self._packed_rows(base, out_features, in_features), transposed)
                yield transposed.reshape(-1)

        def scales() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                yield self._store(self._raw_scales(base, out_features, in_features, group).T, base)

        return Int4Weight(
            packed=Derived("I8", (*stack, in_features, out_features // 2), packed),
            scales=Derived(MODEL_DTYPES[self.dtype], (*stack, in_features // group, out_features), scales),
            prescale=prescale,
            group=group,
        )

    def _group(self, base: str, out_features: int, in_features: int) -> int:
        info = self.source.tensors[f"{base}.{WEIGHT_SCALES}"]
        blocks = info.shape[1] if len(info.shape) == 2 else 0
        if info.shape[:1] != (out_features,) or blocks < 1 or in_features % blocks or out_features % 2:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(info.shape)}, which is no [{out_features}, {in_features}/group]",
                hint="quantize the checkpoint again",
            )
        return in_features // blocks

    def _packed_rows(self, base: str, out_features: int, in_features: int) -> npt.NDArray[np.uint8]:
        raw = self.read(f"{base}.weight", (out_features // 2, in_features), dtypes=("I8",))
        return raw.data.reshape(out_features // 2, in_features)

    def _raw_scales(self, base: str, out_features: int, in_features: int, group: int) -> npt.NDArray[np.float32]:
        name = f"{base}.{WEIGHT_SCALES}"
        raw = self.read(name, (out_features, in_features // group), dtypes=("F32",))
        scales: npt.NDArray[np.float32] = raw.data.view(np.float32).reshape(raw.shape)
        return scales

    def _store(self, scales: npt.NDArray[np.float32], base: str) -> npt.NDArray[np.uint8]:
        """Scales as bytes of the model's type. Raises CheckpointError where that would change a value."""
        scales = np.ascontiguousarray(scales)
        stored: npt.NDArray[np.generic]
        if self.dtype == "float32":
            stored, back = scales, scales
        elif self.dtype == "float16":
            # The comparison below catches an overflow.
            with np.errstate(over="ignore"):
                half = scales.astype(np.float16)
            stored, back = half, half.astype(np.float32)
        else:  # bfloat16 is the upper half of a float32
            upper = (scales.view(np.uint32) >> 16).astype(np.uint16)
            stored, back = upper, (upper.astype(np.uint32) << 16).view(np.float32)
        if not np.array_equal(back, scales):
            raise CheckpointError(
                f"tensor {base}.{WEIGHT_SCALES} holds scales that {self.dtype} cannot represent",
                hint="the checkpoint was quantized for another type: quantize it again",
            )
        return stored.reshape(-1).view(np.uint8)

    def _prescale(self, base: str, in_features: int) -> RawTensor | None:
        name = f"{base}.{PRESCALE}"
        return self.read(name, (in_features,)) if self.has(name) else None

    def _prescale_stack(self, bases: Sequence[str], in_features: int) -> Constant | None:
        """[E, in], or [1, in] where every expert has the same, or None where none has any."""
        scales = [self._prescale(base, in_features) for base in bases]
        kept = [scale for scale in scales if scale is not None]
        if not kept:
            return None
        if len(kept) == len(scales) and all(np.array_equal(scale.data, kept[0].data) for scale in kept):
            return RawTensor(kept[0].dtype, (1, in_features), kept[0].data)
        if len(kept) != len(scales):
            raise CompatibilityError(
                f"some experts of {bases[0].rsplit('.', 2)[0]} have a {PRESCALE} and some have not",
                hint="quantize all experts of a layer by one method",
            )

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            for base in bases:
                yield self.read(f"{base}.{PRESCALE}", (in_features,)).data

        return Derived(kept[0].dtype, (len(bases), in_features), pieces)


def _transpose(rows: npt.NDArray[np.uint8], into: npt.NDArray[np.uint8]) -> None:
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
