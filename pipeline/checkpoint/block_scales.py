"""FP8 weights scaled by blocks, as DeepSeek-V3 ships them: one float32 factor per 128 x 128 block (arXiv 2412.19437
§3.3.2), the last block of a row or column smaller where 128 does not divide it. w = q * scale, in float32; what the
tensors are called is in layouts/scales.py.

E4M3 to float32 without a table: its exponent has 4 bits of bias 7 and its fraction 3, float16's has 5 of bias 15, so
that the bits moved up by 7 are the float16 of 2^-8 times the value, subnormal numbers included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import BLOCK, FP8, count_blocks, target_scale
from pipeline.checkpoint.tensors import RawTensor, TensorSource
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

TILE_ELEMENTS = 1 << 18  # a megabyte of float32 stays in a core's second-level cache
_NAN = 0x7F  # E4M3 has no infinity, and one NaN of either sign
_FLOAT16_SHIFT = 256.0
_LARGE = 1e36  # scales from here on cannot be multiplied by the shift first


def read_weight(source: TensorSource, weight: str) -> torch.Tensor:
    """An engine checkpoint's weight as float32 [O, I] where it is stored in FP8 blocks, else as it is stored."""
    raw = source.read(weight)
    if raw.dtype != FP8:
        return raw.to_torch()
    return _read_all(open_rows(source, weight))


def open_rows(source: TensorSource, weight: str) -> BlockRows:
    """A weight that an engine checkpoint holds in FP8 blocks, to be read by rows."""
    if target_scale(weight) not in source.tensors:
        raise CheckpointError(f"{weight} is {FP8} without {target_scale(weight)}", hint="convert the checkpoint again")
    return BlockRows(weight, source.read(weight), source.read(target_scale(weight)))


class BlockRows:
    """An FP8 weight [O, I] that looks like a float32 tensor, of which any rows can be had and none are kept.

    Raises CheckpointError, naming `name`, for scales of another shape or type or that are not finite; for NaN once the
    rows with it are read.
    """

    def __init__(self, name: str, weight: RawTensor, scales: RawTensor) -> None:
        import torch

        _check_scales(name, weight, scales)
        self.name, self.dtype = name, torch.float32
        self.shape = (weight.shape[0], weight.shape[1])
        self._bytes = weight.data
        self._stored = weight.to_torch().view(torch.int8)
        self._scales = scales.to_torch()
        self._bits = torch.empty(0, self.shape[1], dtype=torch.int16)
        self._values = torch.empty(0, self.shape[1], dtype=torch.float32)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """float32 [rows, I], valid until the next call. `rows` has no step."""
        import torch

        start, stop, _ = rows.indices(self.shape[0])
        columns = self.shape[1]
        _check_piece(self.name, self.shape, self._bytes[start * columns : stop * columns], start * columns)
        if stop - start > self._values.shape[0]:
            self._bits = self._bits.new_empty(stop - start, columns)
            self._values = self._values.new_empty(stop - start, columns)
        bits, values = self._bits[: stop - start], self._values[: stop - start]
        bits.copy_(self._stored[start:stop])  # int8 to int16: the sign is now in bits 15 to 7
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # and here in bit 15 alone
        values.copy_(bits.view(torch.float16))
        for top in range(start // BLOCK * BLOCK, stop, BLOCK):
            part = values[max(top - start, 0) : top + BLOCK - start]
            scale = self._scales[top // BLOCK]
            if float(scale.abs().max()) < _LARGE:
                part.mul_((scale * _FLOAT16_SHIFT).repeat_interleave(BLOCK)[:columns])
            else:
                part.mul_(_FLOAT16_SHIFT).mul_(scale.repeat_interleave(BLOCK)[:columns])
        return values


def dequantize(name: str, weight: RawTensor, scales: RawTensor) -> torch.Tensor:
    """float32 [O, I]. Raises as BlockRows does."""
    return _read_all(BlockRows(name, weight, scales))


def iterate_tiles(name: str, weight: RawTensor, scales: RawTensor) -> Iterator[torch.Tensor]:
    """float32 [rows, I], tile by tile from the top; each is valid until the next. Raises as BlockRows does."""
    rows = BlockRows(name, weight, scales)
    return (rows[start:stop] for start, stop in _tiles(rows))


def _read_all(rows: BlockRows) -> torch.Tensor:
    import torch

    result = torch.empty(rows.shape, dtype=torch.float32)
    for start, stop in _tiles(rows):
        result[start:stop] = rows[start:stop]
    return result


def _tiles(rows: BlockRows) -> Iterator[tuple[int, int]]:
    step = min(BLOCK, max(1, TILE_ELEMENTS // max(rows.shape[1], 1)))
    return ((start, min(start + step, rows.shape[0])) for start in range(0, rows.shape[0], step))


def iterate_kept(name: str, weight: RawTensor) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of an FP8 weight as they are, piece by piece. Raises CheckpointError for NaN."""
    for start in range(0, weight.data.size, TILE_ELEMENTS):
        piece = weight.data[start : start + TILE_ELEMENTS]
        _check_piece(name, weight.shape, piece, start)
        yield piece


def check_config(config: Mapping[str, Any], origin: str) -> None:
    """Raises CheckpointError where `quantization_config` speaks of anything but 128 x 128 blocks of E4M3."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    known = isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not known:
        raise CheckpointError(
            f"{origin}: quantization_config says that the weights are quantized ({method})",
            hint="take the model's 16-bit weights, or what DeepSeek (fp8), AutoAWQ (awq), GPTQ, compressed-tensors or "
            "modelopt quantized",
        )
    size, form = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    if size != [BLOCK, BLOCK] or form != "e4m3":
        raise CheckpointError(
            f"{origin}: quantization_config has weight_block_size {size!r} and fmt {form!r}; read are [{BLOCK}, "
            f"{BLOCK}] and 'e4m3'",
            hint="take the model's 16-bit weights",
        )


def _check_scales(name: str, weight: RawTensor, scales: RawTensor) -> None:
    if len(weight.shape) != 2 or scales.dtype != "F32" or scales.shape != count_blocks(weight.shape):
        raise CheckpointError(
            f"{name} is {weight.dtype}{list(weight.shape)} with scales {scales.dtype}{list(scales.shape)}; blocks of "
            f"{BLOCK} x {BLOCK} have F32{list(count_blocks(weight.shape))}",
            hint="the weights are damaged, or of another block size",
        )
    import numpy as np

    values = scales.data.view(np.float32)
    if not np.isfinite(values).all():
        index = np.unravel_index(int(np.argmin(np.isfinite(values))), scales.shape)
        raise CheckpointError(
            f"{name}: the scale of block {[int(i) for i in index]} is not finite",
            hint="the weights are damaged; no model has such a value: copy them again",
        )


def _check_piece(name: str, shape: tuple[int, ...], piece: npt.NDArray[np.uint8], start: int) -> None:
    import numpy as np

    magnitude = piece & _NAN
    if piece.size and int(magnitude.max()) == _NAN:
        index = np.unravel_index(start + int(np.argmax(magnitude == _NAN)), shape)
        raise CheckpointError(
            f"{name} is NaN at {[int(i) for i in index]}",
            hint="the weights are damaged; no model has such a value: copy them again",
        )
