"""Undoes what TensorRT-LLM does to a linear of a rank: from its checkpoint's tensors to plain numbers and scales.

Written from the description of its loader and kernels: a value is put back where it came from, step by step in the
other direction. O output and I input features of the rank, g inputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.errors import CheckpointError

Parts = dict[str, torch.Tensor]  # by what follows "X."; INT4 values one to an int8

# A word of 32 bits holds its values in this order; a tile is 64 inputs; inputs of one MMA are read in this order.
WORDS = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}
INPUTS = {
    4: [8 * half + pair + 2 * quarter for quarter in range(4) for half in range(4) for pair in range(2)],
    8: [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15],
}
TILE = 64


def undo_linear(row: Mapping[str, Any], parts: Parts, sm: int) -> Parts:
    """A linear [O, I] with its quantization's row: weight [O, I] as integers, FP8 or floats; INT4's scales float32
    [O, I/g]; the others as they are. Raises CheckpointError for a zero point."""
    undo = UNDO.get(row.get("quant_algo"))
    return parts if undo is None else undo(parts, sm)


def _undo_awq(parts: Parts, sm: int) -> Parts:
    """Byte [i, j]: low nibble row 2i, high nibble row 2i + 1, two's complement. Loading casts the scales to the model's
    type, which that of the input has."""
    scales = parts["weights_scaling_factor"].to(parts["prequant_scaling_factor"].dtype).float()
    return {**parts, "weight": _unpack(parts["weight"]), "weights_scaling_factor": scales}


def _undo_w4a8(parts: Parts, sm: int) -> Parts:
    """On loading, the scales are divided by weights_scaling_factor_2 in float16, and the scale of the input by the
    input's step in the model's type; both divisors multiply the product again (`alpha`)."""
    second, step, prescale = (
        parts[kind] for kind in ("weights_scaling_factor_2", "activation_scaling_factor", "prequant_scaling_factor")
    )
    return {
        **parts,
        "weight": _unpack(parts["weight"]),
        "weights_scaling_factor": (parts["weights_scaling_factor"] / second).to(torch.float16).float() * second,
        "prequant_scaling_factor": ((prescale / step.to(prescale.dtype)).float() * step).to(prescale.dtype),
    }


def _undo_gptq(parts: Parts, sm: int) -> Parts:
    zero = parts["zero"]
    if bool(zero.any()):
        raise CheckpointError("a GPTQ weight has zero points, and what is compared with has none")
    columns, quarter = parts["weight"].shape
    stored = parts["weight"].contiguous().view(torch.uint8).reshape(-1)
    weight = undo_processed(stored, columns, 4 * quarter, 4, sm)
    scales = parts["weights_scaling_factor"].T.float().contiguous()
    rest = {kind: tensor for kind, tensor in parts.items() if kind != "zero"}  # a bias, where there is one
    return {**rest, "weight": weight, "weights_scaling_factor": scales}


def _undo_weight_only(parts: Parts, sm: int) -> Parts:
    columns, rows = parts["weight"].shape
    stored = parts["weight"].contiguous().view(torch.uint8).reshape(-1)
    scale = parts["per_channel_scale"].float()
    return {**parts, "weight": undo_processed(stored, columns, rows, 8, sm), "per_channel_scale": scale}


UNDO: dict[Any, Callable[[Parts, int], Parts]] = {
    "W4A16_AWQ": _undo_awq,
    "W4A8_AWQ": _undo_w4a8,
    "W4A16_GPTQ": _undo_gptq,
    "W8A16": _undo_weight_only,
}


def undo_processed(stored: torch.Tensor, columns: int, rows: int, bits: int, sm: int) -> torch.Tensor:
    """The bytes of a processed weight of `columns` inputs and `rows` outputs as int8 [rows, columns]: where value i of
    the memory order stands for (row, column), it is written to (row, column)."""
    values = torch.stack([stored & 15, stored >> 4], dim=1) if bits == 4 else stored
    words = values.reshape(-1, len(WORDS[bits]))
    ordered = torch.empty_like(words)
    ordered[:, WORDS[bits]] = words
    signed = (ordered.to(torch.int16) - (1 << (bits - 1))).to(torch.int8).reshape(-1)
    order = torch.arange(rows * columns).reshape(rows, columns)
    if sm < 90 or sm >= 120:
        together = 16 // bits
        order = order.reshape(rows // together, columns // TILE, together, TILE).transpose(1, 2).reshape(rows, columns)
    by_input = signed[order]
    weight = torch.empty_like(by_input)
    blocks = torch.arange(columns).reshape(-1, len(INPUTS[bits]))
    weight[:, blocks[:, INPUTS[bits]].reshape(-1)] = by_input
    return weight


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    wide = packed.to(torch.int16)
    return torch.stack([_sign(wide & 15), _sign(wide >> 4 & 15)], dim=1).flatten(0, 1)


def _sign(nibbles: torch.Tensor) -> torch.Tensor:
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8)
