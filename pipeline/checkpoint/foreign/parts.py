"""What the tensors of a foreign linear are in the format that holds it (holding.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.holding import Held, cast, round_to
from pipeline.checkpoint.layouts.scales import (
    ACTIVATION_SCALES,
    BLOCK_SCALES,
    CHANNEL_SCALES,
    FP8,
    INT8,
    PRESCALE,
    WEIGHT_SCALES,
    count_blocks,
)

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.foreign.linear import ForeignLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a linear in one of our formats: what follows its name, its type, and how it is made. `once`: of
    linears in one, it is the first's."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    once: bool = False


def list_parts(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    """The tensors of one of the source's linears in the format that holds it."""
    columns = linear.shape[1]
    parts = TENSORS[held.format](linear, held, dtype)
    if held.prescaled and linear.prescale is not None:
        vector = linear.prescale
        parts.append(Part(kind=PRESCALE, dtype=dtype, shape=(columns,), once=True, read=lambda: cast(vector(), dtype)))
    if held.rounds and linear.input_scale is not None:
        parts.append(Part(kind=ACTIVATION_SCALES, dtype="F32", shape=(1,), once=True, read=linear.input_scale))
    return parts


def _int4(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    rows, columns = linear.shape
    count = columns // (held.group or columns)

    def packed() -> torch.Tensor:
        from pipeline.quantization.int4 import pack

        return pack(linear.numbers().contiguous())

    def scales() -> torch.Tensor:
        return round_to(linear.scales(), dtype).repeat_interleave(count // linear.grid[1], 1)

    return [
        Part(kind="weight", dtype=INT8, shape=(rows // 2, columns), read=packed),
        Part(kind=WEIGHT_SCALES, dtype="F32", shape=(rows, count), read=scales),
    ]


def _int8(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    rows = linear.shape[0]
    kind = WEIGHT_SCALES if held.format == "int8_sq" else CHANNEL_SCALES
    return [
        Part(kind="weight", dtype=INT8, shape=linear.shape, read=linear.numbers),
        Part(kind=kind, dtype="F32", shape=(rows,), read=lambda: linear.scales().expand(rows, 1)[:, 0]),
    ]


def _fp8(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    return [
        Part(kind="weight", dtype=FP8, shape=linear.shape, read=linear.numbers),
        Part(kind=WEIGHT_SCALES, dtype="F32", shape=(1,), once=True, read=lambda: linear.scales().reshape(-1)[:1]),
    ]


def _fp8_rows(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    rows = linear.shape[0]
    return [
        Part(kind="weight", dtype=FP8, shape=linear.shape, read=linear.numbers),
        Part(kind=CHANNEL_SCALES, dtype="F32", shape=(rows,), read=lambda: linear.scales().expand(rows, 1)[:, 0]),
    ]


def _fp8_blocks(linear: ForeignLinear, held: Held, dtype: str) -> list[Part]:
    return [
        Part(kind="weight", dtype=FP8, shape=linear.shape, read=linear.numbers),
        Part(kind=BLOCK_SCALES, dtype="F32", shape=count_blocks(linear.shape), read=linear.scales),
    ]


TENSORS: dict[str, Callable[[ForeignLinear, Held, str], list[Part]]] = {
    "int4": _int4,
    "int8": _int8,
    "int8_sq": _int8,
    "fp8": _fp8,
    "fp8_rows": _fp8_rows,
    "fp8_blocks": _fp8_blocks,
}
