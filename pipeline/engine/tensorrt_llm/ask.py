"""What TensorRT-LLM's engine backend is asked to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.engine.tensorrt_llm.mixed_gemm import TILE

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.sharding.ranks import Parallel

# As mixed_gemm.TILE for its weight-only GEMMs: what inputs and outputs of all ranks together must be a multiple of, but
# for a zero padding whose split over ranks is that of its own converter.
FP8_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A decoder layer's linear of the engine checkpoint: `format` as in quantization.catalog.FORMATS, or None."""

    name: str
    out_features: int
    in_features: int
    expert: int | None = None
    format: str | None = None
    group: int | None = None

    @property
    def place(self) -> tuple[int, str]:
        """(layer, name within it)."""
        layer, _, rest = self.name.partition(".layers.")[2].partition(".")
        return int(layer), rest

    @property
    def multiple(self) -> int:
        """Of inputs and outputs of one rank; 1 for floats."""
        least = {"int4_fp8": FP8_TILE, "int4": TILE, "int8": TILE}.get(self.format or "", 1)
        return max(least, self.group or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to run: a model with its linears as stored, of type `dtype`, over ranks of one GPU's kind (`sm`). `head`:
    the format of lm_head, None in 16 bits."""

    architecture: Architecture
    linears: tuple[StoredLinear, ...]
    dtype: str
    parallel: Parallel
    sm: int
    head: str | None = None

    @property
    def formats(self) -> set[str]:
        return {linear.format for linear in self.linears if linear.format}
