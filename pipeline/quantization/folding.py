"""Where a chosen scale goes: into the columns of its linears, and its inverse into the tensor that makes their input.

A linear can take part twice: its columns carry its own group's scale, its rows are divided by the scale of the group
that reads it. Everything is multiplied out in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.block_scales import read_weight
from pipeline.checkpoint.layouts.scales import PRESCALE
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.quantization.problem import Treatment
    from pipeline.quantization.scale_groups import ResolvedFold, ScaleGroup


class Adjustments:
    """The scales of one layer, applied to its tensors. `dtype`: the model's own type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.vectors: dict[str, Tensor] = {}  # linear -> 1/s in the model's type, where s was not folded
        self._columns: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}

    def add(self, group: ScaleGroup, scale: Tensor, source: TensorSource) -> str:
        """Takes up a group's scale [I], one that `realise` gave, and says where its inverse goes."""
        for name in group.linears:
            self._columns[name] = scale
        if group.fold is None:
            vector = (1 / scale).to(self.dtype)
            for name in group.linears:
                self.vectors[name] = vector
            return f"kept as {PRESCALE}"
        rows = torch.ones(source.tensors[f"{group.fold.producer}.weight"].shape[0])
        rows[group.fold.rows] = scale
        producer = group.fold.producer
        self._rows[producer] = rows * self._rows.get(producer, 1.0)
        return producer

    def touches(self, tensor: str) -> bool:
        """Whether `apply` changes this tensor."""
        name, _, kind = tensor.rpartition(".")
        return name in self._rows or (kind == "weight" and name in self._columns)

    def apply(self, tensor: str, values: Tensor) -> Tensor:
        """float32, a weight [O, I], a norm [H] or a bias [O] with its scales multiplied in; `values` if it has none."""
        if not self.touches(tensor):
            return values
        name, _, kind = tensor.rpartition(".")
        result = values.float()
        if kind == "weight" and name in self._columns:
            result = result * self._columns[name]
        if name in self._rows:
            rows = self._rows[name]
            result = result / (rows[:, None] if result.ndim == 2 else rows)
        return result

    def apply_treatment(self, name: str, treatment: Treatment) -> Treatment:
        """Clipping limits [O, I/g] were found before the rows of `name` were divided."""
        if treatment.limits is None or name not in self._rows:
            return treatment
        return replace(treatment, limits=treatment.limits / self._rows[name][:, None])

    def apply_16bit(self, tensor: str, raw: RawTensor) -> RawTensor:
        """A tensor that stays in the model's type, with its scales. Raises QuantizationError where it overflows."""
        return self.round(tensor, raw.to_torch()) if self.touches(tensor) else raw

    def round(self, tensor: str, values: Tensor) -> RawTensor:
        """Values, with the tensor's scales, in the model's type. Raises QuantizationError where they overflow."""
        result = self.apply(tensor, values).to(self.dtype)
        if not torch.isfinite(result).all():
            when = (
                "once the scale of the linear behind it is folded in" if self.touches(tensor) else "out of its blocks"
            )
            raise QuantizationError(
                f"{tensor} overflows {self.dtype} {when}",
                hint="convert to bfloat16 (stages.convert.dtype), or exclude that linear",
            )
        return RawTensor.from_torch(result)


def describe_vector(name: str, columns: int, dtype: str) -> TensorInfo:
    """The prequant_scaling_factor of a linear; `dtype` in safetensors' spelling."""
    return TensorInfo(f"{name}.{PRESCALE}", dtype, (columns,))


def realise(scale: Tensor, fold: ResolvedFold | None, source: TensorSource, dtype: torch.dtype) -> Tensor | None:
    """The scale [I] that is really divided by once its carrier is rounded to `dtype`; None where that overflows.

    A vector or a norm's weight is rounded, so the linears' columns are scaled by what the rounding left: the product
    stays exact. A matrix has no single such scale; its rows are rounded as every weight of the model was.
    """
    if fold is None:
        return _finite(1 / (1 / scale).to(dtype).float())
    weight = read_weight(source, f"{fold.producer}.weight")[fold.rows].float()
    if weight.ndim == 1:
        folded = (weight / scale).to(dtype).float()
        if not torch.isfinite(folded).all():
            return None
        # Weights that vanish (or are zero) carry nothing; any scale is right for them.
        return _finite(torch.where(folded == 0, scale, weight / folded))
    largest = weight.abs().amax(1) / scale
    return scale if largest.max() <= torch.finfo(dtype).max else None


def _finite(scale: Tensor) -> Tensor | None:
    return scale if torch.isfinite(scale).all() and scale.min() > 0 else None
