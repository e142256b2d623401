"""The scale of a layer's quantized KV cache: from the largest value that calibration would have written into it.

One for keys and values, or for MLA's compressed KV and its rotary key, as TensorRT-LLM 1.2 stores it: one step of the
cache's numbers, amax/448 of FP8 E4M3 and amax/127 of INT8. The kernels that read such a cache are not the native
network's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeline.quantization import fp8, int8

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# stages.quantize.kv_cache -> TensorRT-LLM's name, and the step for the largest value.
CACHE_FORMATS: dict[str, tuple[str, Callable[[float], float]]] = {
    "fp8": ("FP8", fp8.input_step),
    "int8": ("INT8", int8.input_step),
}


class CacheRange:
    """Stands where a transformers layer has its cache, sees what is written, and keeps nothing but its magnitude."""

    def __init__(self) -> None:
        self._amax = torch.zeros(())

    def update(self, first: Tensor, second: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values, or the normalized latent and the rotated key: any shapes."""
        self._amax = torch.stack([self._amax, first.abs().max().float(), second.abs().max().float()]).max()
        return first, second

    @property
    def amax(self) -> float:
        """Rounded to bfloat16's 8 bits: the same on every number of threads."""
        return float(self._amax.bfloat16())


def cache_step(kind: str, amax: float) -> Tensor:
    """float32 [1]."""
    return torch.tensor([CACHE_FORMATS[kind][1](amax)], dtype=torch.float32)
