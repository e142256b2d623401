"""A linear of an engine checkpoint and the hub's linears that its rows are: numbers and scales as stored, cut by rows.

Shapes: O output features (rows), I input features, g inputs per group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import (
    ACTIVATION_SCALES,
    BLOCK,
    BLOCK_SCALES,
    CHANNEL_SCALES,
    PRESCALE,
    WEIGHT_SCALES,
    WEIGHT_SCALES_2,
    ZEROS,
    count_blocks,
    find_format,
)
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping as AbstractMapping

    import torch

    from pipeline.checkpoint.layouts import Mapping
    from pipeline.checkpoint.tensors import TensorSource

# Which of a linear's tensors are its weight's scales.
SCALES: AbstractMapping[str, str] = {
    "int4": WEIGHT_SCALES,
    "int4_fp8": WEIGHT_SCALES,
    "int4_zeros": WEIGHT_SCALES,
    "fp8": WEIGHT_SCALES,
    "fp8_rows": CHANNEL_SCALES,
    "fp8_blocks": BLOCK_SCALES,
    "int8": CHANNEL_SCALES,
    "int8_sq": WEIGHT_SCALES,
}
PACKED = ("int4", "int4_fp8", "int4_zeros")  # two numbers in a byte, a scale per group
KINDS = ("weight", *dict.fromkeys(SCALES.values()), WEIGHT_SCALES_2, ZEROS, ACTIVATION_SCALES, PRESCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the hub's linears: `name` without ".weight", and which rows of the engine's it is."""

    name: str
    rows: slice
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """`q` [O, I], int8 or float8_e4m3fn; `scales` float32, [O, I/g] of INT4, [O] of INT8, [1] of FP8, by blocks of FP8
    blocks; `zeros` int8 [O, I/g] where q has a zero point; `second` float32 [1], what INT4's scales are divided by
    where its input is FP8; `inputs` float32 [1], the static scale of its input; `prescale` [I], what its input is
    multiplied by."""

    format: str
    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    second: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    prescale: torch.Tensor | None = None

    def cut(self, rows: slice) -> Numbers:
        scales = self.scales
        if self.format == "fp8_blocks":
            scales = scales[rows.start // BLOCK : -(-rows.stop // BLOCK)]
        elif self.format != "fp8":
            scales = scales[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, q=self.q[rows], scales=scales, zeros=zeros)


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """A weight that is stored in one of the formats of pipeline.quantization, with all that belongs to it."""

    source: TensorSource
    mapping: Mapping
    format: str

    @property
    def base(self) -> str:
        """The engine's name, without ".weight"."""
        return self.mapping.target.removesuffix(".weight")

    @property
    def tensors(self) -> list[str]:
        """The names of the engine tensors that are this linear."""
        return [name for kind in KINDS if (name := f"{self.base}.{kind}") in self.source.tensors]

    @cached_property
    def parts(self) -> list[Part]:
        parts, start = [], 0
        for name, (rows, columns) in zip(self.mapping.sources, self.mapping.source_shapes, strict=True):
            name = name.removesuffix(".weight")
            parts.append(Part(name=name, rows=slice(start, start + rows), shape=(rows, columns)))
            start += rows
        return parts

    @cached_property
    def group(self) -> int | None:
        """Inputs per scale of INT4."""
        return self.mapping.target_shape[1] // self._scale_shape[1] if self.format in PACKED else None

    @property
    def is_prescaled(self) -> bool:
        return f"{self.base}.{PRESCALE}" in self.source.tensors

    @property
    def is_static(self) -> bool:
        """Whether its input is rounded, by a scale that is stored."""
        return f"{self.base}.{ACTIVATION_SCALES}" in self.source.tensors

    def read_scales(self) -> torch.Tensor:
        return self.source.read(f"{self.base}.{SCALES[self.format]}").to_torch()

    def read(self) -> Numbers:
        """All of it, the numbers of INT4 unpacked."""
        from pipeline.quantization.int4 import unpack

        stored = self.source.read(f"{self.base}.weight").to_torch()
        return Numbers(
            format=self.format,
            q=unpack(stored) if self.format in PACKED else stored,
            scales=self.read_scales(),
            zeros=self._read_optional(ZEROS),
            second=self._read_optional(WEIGHT_SCALES_2),
            inputs=self._read_optional(ACTIVATION_SCALES),
            prescale=self._read_optional(PRESCALE),
        )

    def check(self) -> None:
        """Raises CheckpointError where the tensors are not of the shapes that go with config.json's."""
        rows, columns = self.mapping.target_shape
        is_packed = self.format in PACKED
        groups = self._scale_shape[-1] if is_packed else 1
        in_groups = (rows, groups if groups and columns % groups == 0 else columns)
        wanted = {
            "weight": (rows // 2, columns) if is_packed else (rows, columns),
            SCALES[self.format]: {"fp8": (1,), "fp8_blocks": count_blocks((rows, columns))}.get(
                self.format, in_groups if is_packed else (rows,)
            ),
            ZEROS: in_groups,
            WEIGHT_SCALES_2: (1,),
            PRESCALE: (columns,),
            ACTIVATION_SCALES: (1,),
        }
        for kind, shape in wanted.items():
            info = self.source.tensors.get(f"{self.base}.{kind}")
            if info is not None and info.shape != shape:
                raise CheckpointError(
                    f"{info.name} is {info.dtype}{list(info.shape)}; a weight {[rows, columns]} in {self.format} goes "
                    f"with {list(shape)}",
                    hint="convert and quantize again; the folder is damaged or its config.json was changed",
                )

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        return self.source.tensors[f"{self.base}.{SCALES[self.format]}"].shape

    def _read_optional(self, kind: str) -> torch.Tensor | None:
        name = f"{self.base}.{kind}"
        return self.source.read(name).to_torch() if name in self.source.tensors else None


def find_linear(source: TensorSource, mapping: Mapping) -> QuantizedLinear | None:
    """The quantized linear that a mapping's target is; None where it is plain floats, or no weight. Raises
    CheckpointError for tensors of other shapes."""
    if not mapping.target.endswith(".weight"):
        return None
    stored = find_format(source.tensors, mapping.target.removesuffix(".weight"))
    if stored is None:
        return None
    linear = QuantizedLinear(source=source, mapping=mapping, format=stored)
    linear.check()
    return linear
