"""A linear's tensors as TensorRT-LLM's checkpoints store them, from a rank's slice of the engine checkpoint: one row
per format. Most are the engine checkpoint's own bytes, since its layout is theirs.

Shapes: O output and I input features of the rank, g inputs of a group, E experts of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.layouts.scales import (
    ACTIVATION_SCALES,
    CHANNEL_SCALES,
    PRESCALE,
    WEIGHT_SCALES,
    WEIGHT_SCALES_2,
)
from pipeline.checkpoint.tensors import DTYPES, MODEL_DTYPES, RawTensor
from pipeline.engine.tensorrt_llm import mixed_gemm
from pipeline.network.derived import Derived

if TYPE_CHECKING:
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.engine.tensorrt_llm.rank_quantization import RankQuantization

Tensors = dict[str, Derived]  # by what follows "X."
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """A rank's slice of the engine checkpoint, and what decides how its weights are stored."""

    source: TensorSource
    dtype: str
    quantization: RankQuantization
    sm: int

    def pass_on(self, name: str) -> Derived:
        """A tensor as it is."""
        info = self.source.tensors[name]

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            yield self.source.read(name).data
            self.release(name)

        return Derived(info.dtype, info.shape, pieces)

    def make(self, dtype: str, shape: tuple[int, ...], names: Sequence[str], make: Callable[[], Bytes]) -> Derived:
        """One that is computed from `names`."""

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            yield make()
            for name in names:
                self.release(name)

        return Derived(dtype, shape, pieces)

    def release(self, name: str) -> None:
        """Lets go of the tensor's resident pages, where the source maps files."""
        release = getattr(self.source, "release", None)
        if release is not None:
            release(name)


def list_tensors(weights: RankWeights, base: str, form: str | None) -> Tensors:
    """The tensors of the linear `base`, its bias among them."""
    tensors = FORMATS[form](weights, base)
    if f"{base}.bias" in weights.source.tensors:
        tensors["bias"] = weights.pass_on(f"{base}.bias")
    return tensors


def _same(weights: RankWeights, base: str, *kinds: str) -> Tensors:
    return {kind: weights.pass_on(f"{base}.{kind}") for kind in ("weight", *kinds)}


def _with_prescale(weights: RankWeights, base: str, *kinds: str) -> Tensors:
    """TensorRT-LLM multiplies the input of every linear of these formats: by ones where the engine checkpoint has the
    scale in what comes before."""
    tensors = _same(weights, base, *kinds)
    name = f"{base}.{PRESCALE}"
    if name in weights.source.tensors:
        tensors[PRESCALE] = weights.pass_on(name)
    else:
        columns = weights.source.tensors[f"{base}.weight"].shape[1]
        ones = store_floats(np.ones(columns, np.float32), weights.dtype)
        tensors[PRESCALE] = weights.make(MODEL_DTYPES[weights.dtype], (columns,), (), lambda: ones)
    return tensors


def _int4(weights: RankWeights, base: str) -> Tensors:
    if weights.quantization.is_gptq:
        return _gptq(weights, base)
    return _with_prescale(weights, base, WEIGHT_SCALES)


def _gptq(weights: RankWeights, base: str) -> Tensors:
    """weight [I, O/4] of four nibbles each, as if of the model's type; scales and zeros [I/g, O] of that type. Ours are
    symmetric: -7 + 8 - 1 = 0 times the scale (its converter's formula for a stored zero point of 7)."""
    name, scale = f"{base}.weight", f"{base}.{WEIGHT_SCALES}"
    half, inputs = weights.source.tensors[name].shape
    groups = weights.source.tensors[scale].shape[1]
    stored, outputs = MODEL_DTYPES[weights.dtype], 2 * half

    def process() -> Bytes:
        from pipeline.quantization.int4 import unpack

        q = unpack(weights.source.read(name).to_torch()).numpy()
        return mixed_gemm.process(q.T, 4, weights.sm, name=name)

    def transpose() -> Bytes:
        values = weights.source.read(scale).data.view(np.float32).reshape(outputs, groups)
        return store_floats(values.T, weights.dtype)

    zeros = np.zeros(groups * outputs * DTYPES[stored][0], np.uint8)
    return {
        "weight": weights.make(stored, (inputs, outputs // 4), (name,), process),
        WEIGHT_SCALES: weights.make(stored, (groups, outputs), (scale,), transpose),
        "zero": weights.make(stored, (groups, outputs), (), lambda: zeros),
    }


def _int8(weights: RankWeights, base: str) -> Tensors:
    """weight [I, O] processed, per_channel_scale [O] in the model's type, which rounds it."""
    name, scale = f"{base}.weight", f"{base}.{CHANNEL_SCALES}"
    outputs, inputs = weights.source.tensors[name].shape

    def process() -> Bytes:
        q = weights.source.read(name).data.view(np.int8).reshape(outputs, inputs)
        return mixed_gemm.process(q.T, 8, weights.sm, name=name)

    def round_scales() -> Bytes:
        return store_floats(weights.source.read(scale).data.view(np.float32), weights.dtype)

    return {
        "weight": weights.make("I8", (inputs, outputs), (name,), process),
        CHANNEL_SCALES: weights.make(MODEL_DTYPES[weights.dtype], (outputs,), (scale,), round_scales),
    }


# How a linear of each format is stored. FP8 keeps its own scale, also beside another half of a gated MLP.
FORMATS: dict[str | None, Callable[[RankWeights, str], Tensors]] = {
    None: _same,
    "int4": _int4,
    "int4_fp8": lambda w, base: _with_prescale(w, base, WEIGHT_SCALES, WEIGHT_SCALES_2, ACTIVATION_SCALES),
    "fp8": lambda w, base: _same(w, base, WEIGHT_SCALES, ACTIVATION_SCALES),
    "int8": _int8,
    "int8_sq": lambda w, base: _with_prescale(w, base, WEIGHT_SCALES, ACTIVATION_SCALES),
}


def store_floats(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """float32 as bytes of the model's type, rounded to it."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))
    return RawTensor.from_torch(tensor).data
