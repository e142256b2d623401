"""Rounding to nearest in the formats that a quantized checkpoint is in: what its method has to beat.

Nothing of it is written: a linear is rounded when the network reads it, from the original's weights, so that the
baseline takes its part in a comparison one decoder layer at a time like any checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.block_scales import read_weight
from pipeline.checkpoint.layouts.scales import ACTIVATION_SCALES, BLOCK_SCALES, CACHE_SCALES, find_format
from pipeline.checkpoint.tensors import DTYPES, MODEL_DTYPES, RawTensor, TensorInfo
from pipeline.quantization.catalog import METHODS
from pipeline.quantization.formats import FORMATS
from pipeline.quantization.problem import Treatment
from pipeline.quantization.report import REPORT, QuantizationReport
from pipeline.quantization.rules import Linear
from pipeline.quantization.shard import model_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.evaluation.subject import Subject

FLOATS = frozenset(MODEL_DTYPES.values())
# Format -> the method whose format it is rounded to. What range an 8-bit input has without the scale that a method gave
# it is known of fp8 alone: else the baseline leaves inputs in 16 bits.
NEAREST = {
    "int4": "rtn",
    "int4_fp8": "rtn",
    "fp8": "fp8",
    "fp8_blocks": "fp8_blocks",
    "int8": "int8",
    "int8_sq": "int8",
}


class RoundedSource:
    """A TensorSource: `original` in `quantized`'s type, with `linears` rounded as they are read. Ranges of inputs and
    cache, which no rounding of weights changes, are `quantized`'s."""

    def __init__(self, original: Subject, quantized: Subject, linears: Mapping[str, Linear]) -> None:
        self._original, self._quantized = original.source, quantized.source
        self._dtype = model_dtype(quantized.dtype)
        self._made: dict[str, RawTensor] = {}  # of the last linear
        self._linears: dict[str, Linear] = {}  # by the names of their tensors
        described: dict[str, TensorInfo] = {}
        for linear in linears.values():
            for info in FORMATS[linear.format].describe(linear):
                described[info.name], self._linears[info.name] = info, linear
        ranges = {name: info for name, info in quantized.source.tensors.items() if name.endswith(CACHE_SCALES)}
        self._borrowed = {*ranges, *(name for name in described if name.endswith(ACTIVATION_SCALES))}
        stale = {f"{name}.{BLOCK_SCALES}" for name in linears}
        kept = {name: self._retype(info) for name, info in original.source.tensors.items() if name not in stale}
        self.tensors: Mapping[str, TensorInfo] = kept | ranges | described

    def read(self, name: str) -> RawTensor:
        if name in self._borrowed:
            return self._quantized.read(name)
        linear = self._linears.get(name)
        if linear is None:
            return self._cast(self._original.read(name), self.tensors[name].dtype)
        if name not in self._made:
            stored = self._original.tensors[f"{linear.name}.weight"].dtype
            weight = read_weight(self._original, f"{linear.name}.weight")
            weight = weight.to(self._dtype) if stored in FLOATS else weight
            packed = FORMATS[linear.format].pack(linear, weight, Treatment(input_amax=1.0), self._dtype)
            names = [info.name for info in FORMATS[linear.format].describe(linear)]
            self._made = dict(zip(names, packed, strict=True))
        return self._made[name]

    def _retype(self, info: TensorInfo) -> TensorInfo:
        """In a type that the model computes in, where the quantized checkpoint has it in another of them."""
        other = self._quantized.tensors.get(info.name, info).dtype
        return info._replace(dtype=other) if {info.dtype, other} <= FLOATS else info

    @staticmethod
    def _cast(raw: RawTensor, dtype: str) -> RawTensor:
        return raw if raw.dtype == dtype else RawTensor.from_torch(raw.to_torch().to(model_dtype(DTYPES[dtype][1])))

    def release(self, name: str) -> None:
        self._made = {}
        if name in self._original.tensors and hasattr(self._original, "release"):
            self._original.release(name)


def make_baseline(original: Subject, quantized: Subject) -> Subject | None:
    """The baseline of a checkpoint that the quantize stage wrote; None of any other, where rounding to nearest is what
    it is already, and where `original` has not the weights to round. Raises CheckpointError for a damaged report."""
    file = quantized.folder.path / REPORT
    if quantized.folder.own is None or not file.is_file():
        return None
    rows = QuantizationReport.read(file).linears
    weights = original.source.tensors
    if not any(METHODS[row["method"]].measures for row in rows.values()) or any(
        row["format"] not in NEAREST
        or f"{name}.weight" not in weights
        or find_format(weights, name) not in (None, "fp8_blocks")
        for name, row in rows.items()
    ):
        return None
    linears = {}
    for name, row in rows.items():
        outputs, inputs = weights[f"{name}.weight"].shape
        linears[name] = Linear(
            name=name,
            role="",  # no matter here, as where it is
            layer=None,
            expert=None,
            shape=(outputs, inputs),
            method=NEAREST[row["format"]],
            group=row["group_size"],
        )
    source = RoundedSource(original, quantized, linears)
    return replace(
        quantized, label=f"to nearest as {quantized.label} (baseline)", source=source, folder=original.folder
    )
