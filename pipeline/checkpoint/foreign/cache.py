"""Scales of a quantized cache, which modelopt and compressed-tensors store of keys and of values.

The engine checkpoint has one of both: the larger, as TensorRT-LLM takes it when it loads such a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.headers import FLOAT_TYPES, Headers
from pipeline.checkpoint.layouts.scales import CACHE_SCALES, cache_scale

if TYPE_CHECKING:
    import torch

# Of keys and of values, after "model.layers.L.self_attn.": modelopt's, and compressed-tensors'.
PAIRS = (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """Of one layer: the source's tensors, what stands for both under its names, and the engine's."""

    headers: Headers
    base: str
    pair: tuple[str, str]
    target: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.headers.names(self.base, *self.pair)

    @property
    def name(self) -> str:
        return f"{self.base}.{CACHE_SCALES.rpartition('.')[2]}"

    def read(self) -> torch.Tensor:
        """float32 [1]."""
        import torch

        return torch.stack([self.headers.read(self.base, kind).float().reshape(1) for kind in self.pair]).amax(0)


def find_cache_scales(headers: Headers, layers: int) -> dict[int, CacheScales]:
    """By layer; none where there are none. Raises CheckpointError for one without the other."""
    found = {}
    for layer in range(layers):
        base = f"model.layers.{layer}.self_attn"
        for pair in PAIRS:
            if any(headers.has(base, kind) for kind in pair):
                for kind in pair:
                    headers.check(base, kind, FLOAT_TYPES, (), (1,))
                found[layer] = CacheScales(headers=headers, base=base, pair=pair, target=cache_scale(layer))
    return found
