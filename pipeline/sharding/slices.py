"""A rank's slices of an engine checkpoint: cut when read, names unchanged (global layers and experts), nothing stored.

A linear that is cut along its inputs gives one part of a sum. Its bias stays whole on every rank, and must be added
once, to the sum. Layers for multi-token prediction are left out: they are no part of the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.rows import MTP_PREFIX
from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES, find_format
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo, TensorSource
from pipeline.errors import CheckpointError
from pipeline.sharding.divisions import Axis, check_division, divisions
from pipeline.sharding.ranks import Rank, experts, layers
from pipeline.sharding.spreading import GROUPED, Spreading, Stored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.architecture import Architecture

Stretches = list[tuple[int, int]]
EMBEDDING = "transformer.vocab_embedding."
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of each dimension of a tensor: stretches, or None for all."""

    stretches: tuple[Stretches | None, ...]

    @property
    def is_whole(self) -> bool:
        return all(stretch is None for stretch in self.stretches)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.is_whole:  # also of a tensor that the rule says nothing of: one number for all
            return shape
        return tuple(
            size if stretch is None else sum(stop - start for start, stop in stretch)
            for size, stretch in zip(shape, self.stretches, strict=True)
        )

    def take(self, raw: RawTensor) -> RawTensor:
        """A view where the rank's elements lie next to each other, else a copy of them alone."""
        import numpy as np

        width = DTYPES[raw.dtype][0]
        rows, columns = self.stretches if len(raw.shape) == 2 else (self.stretches[0], None)
        matrix = raw.data.reshape(raw.shape[0], -1)
        if columns is not None:
            ((first, last),) = columns  # no tensor is fused along its inputs
            matrix = matrix[:, first * width : last * width]
        pieces = [matrix[first:last] for first, last in rows] if rows is not None else [matrix]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        data: npt.NDArray[np.uint8] = np.ascontiguousarray(whole).reshape(-1)
        return RawTensor(raw.dtype, self.shape(raw.shape), data)


@dataclass(frozen=True, slots=True)
class SlicedSource:
    """A TensorSource of one rank's part of another."""

    source: TensorSource
    tensors: Mapping[str, TensorInfo]
    cuts: Mapping[str, Cut]

    def read(self, name: str) -> RawTensor:
        raw, cut = self.source.read(name), self.cuts[name]
        return raw if cut.is_whole else cut.take(raw)

    def release(self, name: str) -> None:
        """Lets go of the tensor's resident pages, where the source maps files."""
        release = getattr(self.source, "release", None)
        if release is not None:
            release(name)


def slice_source(source: TensorSource, architecture: Architecture, rank: Rank) -> TensorSource:
    """The rank's part of an engine checkpoint, lazily; the source itself of a model of one rank.

    Raises CompatibilityError, with the sizes that would work, where ranks would get unequal parts or a quantization
    group or block would be cut; CheckpointError for a tensor of no known kind.
    """
    parallel = rank.parallel
    if parallel.world == 1:
        return source
    spreading, held = Spreading(architecture), _Held(architecture, rank)
    ways: dict[Axis, int] = {"tensor": parallel.tensor, "moe_tensor": parallel.moe_tensor}
    places: dict[Axis, int] = {"tensor": rank.tensor, "moe_tensor": rank.moe_tensor}
    asked = divisions(architecture)
    infos = source.tensors
    known: dict[tuple[str, str | None, int], tuple[Stored, ...]] = {}
    stored: dict[str, tuple[Stored, ...]] = {}
    for name, info in infos.items():  # of all ranks, so that every rank refuses the same
        if name.startswith(MTP_PREFIX):
            continue
        base = name.rpartition(".")[0]
        form = find_format(infos, base)
        key = spreading.pattern(name), form, _read_group(infos, base) if form in GROUPED else 0
        if key not in known:
            known[key] = spreading.dimensions(*key)
            asked += [division for dimension in known[key] for division in dimension.divisions(base)]
        _check_shape(info, known[key])
        stored[name] = known[key]
    check_division(parallel, asked)
    cuts = {
        name: Cut(tuple(dimension.cut(ways, places) for dimension in dimensions))
        for name, dimensions in stored.items()
        if held.has(name)
    }
    tensors = {name: infos[name]._replace(shape=cut.shape(infos[name].shape)) for name, cut in cuts.items()}
    return SlicedSource(source, tensors, cuts)


def _read_group(infos: Mapping[str, TensorInfo], base: str) -> int:
    """Inputs per scale of a linear in INT4."""
    weight, scales = infos[f"{base}.weight"].shape, infos[f"{base}.{WEIGHT_SCALES}"]
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if groups < 1 or weight[1] % groups:
        raise CheckpointError(
            f"tensor {scales.name} has shape {list(scales.shape)}, which is no [out, {weight[1]}/group]",
            hint="quantize the checkpoint again",
        )
    return weight[1] // groups


def _check_shape(info: TensorInfo, dimensions: tuple[Stored, ...]) -> None:
    """Once cut, a tensor of the wrong size would look right."""
    shape = tuple(dimension.size for dimension in dimensions)
    if dimensions and info.shape != shape:
        raise CheckpointError(
            f"tensor {info.name} has shape {list(info.shape)}, the architecture says {list(shape)}",
            hint="config.json and the tensors are of different models",
        )


class _Held:
    """Which tensors a rank has at all: those of its layers, and of their experts its own."""

    def __init__(self, architecture: Architecture, rank: Rank) -> None:
        self._layers, self._experts = range(*layers(architecture, rank)), experts(architecture, rank)
        self._is_first = rank.pipeline == 0
        self._is_last = rank.pipeline == rank.parallel.pipeline - 1
        self._tied = architecture.tie_word_embeddings

    def has(self, name: str) -> bool:
        found = _LAYER.match(name)
        if found is not None:
            expert = found[2]
            return int(found[1]) in self._layers and (expert is None or int(expert) in self._experts)
        if name.startswith(EMBEDDING):
            return self._is_first or (self._tied and self._is_last)
        return self._is_last  # the final norm and the head
