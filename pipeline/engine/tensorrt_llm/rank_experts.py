"""Experts as TensorRT-LLM's MoE plugin takes them: all of a rank as one stack, both halves of a gated MLP as one
weight. That has one FP8 scale, the larger of its halves'; the other half's numbers are rounded to it once more.

Shapes: O output and I input features of the rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.layouts.scales import ACTIVATION_SCALES, FP8, WEIGHT_SCALES
from pipeline.errors import CheckpointError
from pipeline.network.derived import Derived

if TYPE_CHECKING:
    import numpy.typing as npt

    from pipeline.engine.tensorrt_llm.rank_linears import Bytes, RankWeights, Tensors


def fuse(weights: RankWeights, entries: Sequence[Sequence[str]], *, stacked: bool) -> Tensors:
    """Each entry's linears one below the other, `[O, I]`; all entries as [E, O, I] if `stacked`. In FP8 also the
    weights' scales, [E, 1] or [1], and the one step of the input, [1]."""
    infos = weights.source.tensors
    first = infos[f"{entries[0][0]}.weight"]
    rows = sum(infos[f"{base}.weight"].shape[0] for base in entries[0])
    leading = (len(entries),) if stacked else ()
    is_fp8 = first.dtype == FP8

    def pieces() -> Iterator[Bytes]:
        for entry in entries:
            shared = max(_scale(weights, base) for base in entry) if is_fp8 else 1.0
            for base in entry:
                name = f"{base}.weight"
                data = weights.source.read(name).data
                yield data if not is_fp8 else rescale(data, _scale(weights, base), shared)
                weights.release(name)

    fused = {"weight": Derived(first.dtype, (*leading, rows, first.shape[1]), pieces)}
    if not is_fp8:
        return fused
    scales = np.array([max(_scale(weights, base) for base in entry) for entry in entries], np.float32).view(np.uint8)
    step = _find_step(weights, [base for entry in entries for base in entry])
    return fused | {
        WEIGHT_SCALES: weights.make("F32", (*leading, 1), (), lambda: scales),
        ACTIVATION_SCALES: weights.make("F32", (1,), (), lambda: step),
    }


def rescale(data: npt.NDArray[np.uint8], scale: float, shared: float) -> npt.NDArray[np.uint8]:
    """FP8 numbers that stand for multiples of `scale`, as those of `shared`, rounded to nearest."""
    if scale == shared:
        return data
    import torch

    from pipeline.quantization.fp8 import encode

    q = torch.from_numpy(data.copy()).view(torch.float8_e4m3fn)
    result: npt.NDArray[np.uint8] = encode(q.float() * (scale / shared)).view(torch.uint8).numpy()
    return result


def _scale(weights: RankWeights, base: str) -> float:
    return float(weights.source.read(f"{base}.{WEIGHT_SCALES}").data.view(np.float32)[0])


def _find_step(weights: RankWeights, bases: Sequence[str]) -> npt.NDArray[np.uint8]:
    steps = {weights.source.read(f"{base}.{ACTIVATION_SCALES}").data.tobytes() for base in bases}
    if len(steps) > 1:
        raise CheckpointError(
            f"{bases[0]} and others of its layer have {len(steps)} {ACTIVATION_SCALES}s; TensorRT-LLM has one",
            hint="quantize the checkpoint again",
        )
    return np.frombuffer(steps.pop(), np.uint8)
