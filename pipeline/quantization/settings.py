"""The settings that quantization reads: `stages.quantize` of a config has them, and so may anything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.quantization.calibration_files import CalibrationFile
from pipeline.quantization.selection import Rules


class CalibrationSettings(Protocol):
    """Text that activations are measured on: `samples` pieces of `length` tokens, drawn with `seed`."""

    @property
    def files(self) -> Sequence[CalibrationFile | Path]: ...
    @property
    def samples(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def seed(self) -> int: ...


def count_scratch(calibration: CalibrationSettings, hidden_size: int) -> int:
    """Bytes of the hidden states that calibration keeps in files: before a layer, behind it, and what its experts
    read."""
    return 3 * calibration.samples * calibration.length * hidden_size * 4


class QuantizeSettings(Protocol):
    """How to quantize: the rules of what becomes of each linear, and what the report calls it (`method`, `group_size`).

    `unrouted_experts` is what happens to experts that calibration gave next to no tokens: "round_to_nearest" leaves out
    the search, "share_scale" searches on the tokens that the whole layer saw, "error" stops. The scale of the experts'
    shared input is the layer's in any case; tokens that such an expert was not given have no part in its choice.
    """

    @property
    def method(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def calibration(self) -> CalibrationSettings: ...
    @property
    def unrouted_experts(self) -> str: ...
    @property
    def clip(self) -> bool: ...
    @property
    def kv_cache(self) -> str:
        """ "none", or what each layer's cache scale is for: a key of kv_cache.CACHE_FORMATS."""
        ...
