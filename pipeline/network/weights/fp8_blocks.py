"""FP8 in blocks of 128 x 128, as DeepSeek ships it. The engine dequantizes it at every step: memory saved, not time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.layouts.scales import BLOCK, BLOCK_SCALES, FP8, count_blocks
from pipeline.network.derived import Constant, Derived
from pipeline.network.graph import Graph, Tensor
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.source import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """One linear in FP8 blocks, or a stack of them ([E, …] in front), zeros added where its last blocks are not whole.

    weight: F8_E4M3 [out, in], rounded up to blocks. scales: F32 [blocks of out, blocks of in].
    """

    weight: Constant
    scales: Constant


def lower(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in]."""
    blocks = read_blocks(weights, bases, out_features, in_features, stacked)
    return Operand(weight=dequantize(at, blocks, out_features, in_features), transposed=True)


def dequantize(at: Graph, blocks: BlockWeight, out_features: int, in_features: int) -> Tensor:
    """W [out, in] or, of a stack, [E, out, in], without what was added to make its blocks whole."""
    stored = at.constant("weight", blocks.weight)
    rank = len(blocks.weight.shape)
    # TensorRT does not take one scale for blocks ("ScaleMode is illegal"), only for the whole.
    single = math.prod(blocks.scales.shape) == 1
    scales = at.constant(BLOCK_SCALES, blocks.scales, (1,) if single else None)
    block = None if single else (1,) * (rank - 2) + (BLOCK, BLOCK)
    weight = at.dequantize_as_model("dequantize", stored, scales, block=block)
    for axis, size, name in ((rank - 2, out_features, "rows"), (rank - 1, in_features, "columns")):
        if blocks.weight.shape[axis] != size:
            weight = at.slice(f"{name}_of_weight", weight, axis, 0, size)
    return weight


def read_blocks(
    weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> BlockWeight:
    """No copy of a single linear whose blocks are whole. Raises as Weights.read does."""
    shape, blocks = (out_features, in_features), count_blocks((out_features, in_features))
    rows, columns = (BLOCK * count for count in blocks)
    for base in bases:  # refused now, not when the bytes are made
        weights.check(f"{base}.weight", shape, dtypes=(FP8,))
        weights.check(f"{base}.{BLOCK_SCALES}", blocks, dtypes=("F32",))
    names = [f"{base}.{BLOCK_SCALES}" for base in bases]
    scales: Constant
    if stacked:
        scales = weights.read_stack(names, blocks, dtypes=("F32",))
    else:
        scales = weights.read(names[0], blocks, dtypes=("F32",))
    if not stacked and (rows, columns) == shape:
        return BlockWeight(weight=weights.read(f"{bases[0]}.weight", shape, dtypes=(FP8,)), scales=scales)

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        for base in bases:
            stored = weights.read(f"{base}.weight", shape, dtypes=(FP8,)).data
            if (rows, columns) != shape:
                whole = np.zeros((rows, columns), np.uint8)
                whole[:out_features, :in_features] = stored.reshape(shape)
                stored = whole.reshape(-1)
            yield stored

    leading = (len(bases),) if stacked else ()
    return BlockWeight(weight=Derived(FP8, (*leading, rows, columns), pieces), scales=scales)
