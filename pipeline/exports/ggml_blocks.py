"""Weights in ggml's types, row by row: plain floats, Q4_0 and Q8_0, each only where it is exact.

Q4_0: 32 inputs to a block of 18 bytes, a float16 d and 16 bytes with input j in the low nibble and j + 16 in the high
one, w = d·(q - 8). Q8_0: a float16 d and 32 int8, w = d·q. A group of 64 or 128 inputs is two or four blocks of one
scale; a channel of INT8 is as many as fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.exports.refusals import refuse_prescaled, refuse_wide_scales
from pipeline.quantization.words import ZERO

if TYPE_CHECKING:
    import torch

    from pipeline.exports.linear import Numbers, QuantizedLinear

Rows = npt.NDArray[np.uint8]  # [rows, bytes of a row]
BLOCK = 32
FLOATS = ("F32", "F16", "BF16")  # the same in safetensors and ggml
WIDTHS: Mapping[str, tuple[int, int]] = {  # ggml type -> (values of a block, bytes of it)
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (BLOCK, 18),
    "Q8_0": (BLOCK, 34),
}


def row_bytes(kind: str, columns: int) -> int:
    values, size = WIDTHS[kind]
    return columns // values * size


def encode_q4(numbers: Numbers) -> Rows:
    """[O, I/32 * 18] of symmetric INT4."""
    rows, columns = numbers.q.shape
    q = (numbers.q.numpy() + ZERO).astype(np.uint8).reshape(rows, -1, BLOCK)
    blocks = np.empty((rows, columns // BLOCK, 18), np.uint8)
    blocks[:, :, :2] = _scales(numbers.scales, columns)
    blocks[:, :, 2:] = q[:, :, : BLOCK // 2] | q[:, :, BLOCK // 2 :] << 4
    return blocks.reshape(rows, -1)


def encode_q8(numbers: Numbers) -> Rows:
    """[O, I/32 * 34] of INT8 with a scale per channel."""
    rows, columns = numbers.q.shape
    blocks = np.empty((rows, columns // BLOCK, 34), np.uint8)
    blocks[:, :, :2] = _scales(numbers.scales[:, None], columns)
    blocks[:, :, 2:] = numbers.q.numpy().view(np.uint8).reshape(rows, -1, BLOCK)
    return blocks.reshape(rows, -1)


def _scales(scales: torch.Tensor, columns: int) -> npt.NDArray[np.uint8]:
    """[O, groups] as float16 bytes [O, I/32, 2]."""
    halves = scales.numpy().astype(np.float16)
    per_block = np.repeat(halves, columns // BLOCK // halves.shape[1], axis=1)
    return np.ascontiguousarray(per_block)[:, :, None].view(np.uint8)


# Of ours: the ggml type, and how it is made.
ENCODERS: Mapping[str, tuple[str, Callable[[Numbers], Rows]]] = {
    "int4": ("Q4_0", encode_q4),
    "int8": ("Q8_0", encode_q8),
}


def refuse(linear: QuantizedLinear) -> str | None:
    """Why a linear cannot be stored exactly in a type of ggml's."""
    if (reason := refuse_prescaled(linear)) is not None:
        return reason
    if linear.mapping.target_shape[1] % BLOCK:
        return f"its inputs are no multiple of {BLOCK}"
    return refuse_wide_scales(linear)
