"""An engine checkpoint as if it had more key/value heads: where there are fewer than ranks, several ranks hold the same
head, each as its own (TensorRT-LLM's `dup_kv_weight`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.layouts.scales import CHANNEL_SCALES, WEIGHT_SCALES
from pipeline.checkpoint.tensors import RawTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorInfo, TensorSource

QKV = ".attention.qkv."
BY_ROW = ("weight", "bias", WEIGHT_SCALES, CHANNEL_SCALES)  # what has a row, or two rows' halves, for each output


def repeat_heads_of(source: TensorSource, architecture: Architecture, heads: int) -> TensorSource:
    """`source` with `heads` key/value heads, a multiple of the architecture's; itself where that is what it has."""
    return source if heads == architecture.num_kv_heads else _RepeatedHeads(source, architecture, heads)


class _RepeatedHeads:
    def __init__(self, source: TensorSource, architecture: Architecture, heads: int) -> None:
        self.source = source
        self.queries, self.kept, self.heads = architecture.num_heads, architecture.num_kv_heads, heads
        self.tensors: Mapping[str, TensorInfo] = {
            name: info._replace(shape=(self._rows(info.shape[0]), *info.shape[1:])) if self._has_rows(info) else info
            for name, info in source.tensors.items()
        }

    def read(self, name: str) -> RawTensor:
        raw = self.source.read(name)
        if not self._has_rows(self.source.tensors[name]):
            return raw
        by_head = raw.data.reshape(self.queries + 2 * self.kept, -1)
        q, k, v = np.split(by_head, [self.queries, self.queries + self.kept])
        times = self.heads // self.kept
        data = np.concatenate([q, np.repeat(k, times, axis=0), np.repeat(v, times, axis=0)])
        return RawTensor(raw.dtype, self.tensors[name].shape, data.reshape(-1))

    def release(self, name: str) -> None:
        release = getattr(self.source, "release", None)
        if release is not None:
            release(name)

    def _has_rows(self, info: TensorInfo) -> bool:
        base, _, kind = info.name.rpartition(".")
        return f"{base}.".endswith(QKV) and kind in BY_ROW and info.shape != (1,)

    def _rows(self, count: int) -> int:
        return count // (self.queries + 2 * self.kept) * (self.queries + 2 * self.heads)
