"""A Hugging Face checkpoint read as an engine checkpoint: the layout's mappings applied tensor by tensor, as they are
asked for. Nothing is written, and nothing is kept but the files' own mapping.

Values stay what they are: tensors of one type are passed on in it, those of several are widened to float32, which holds
all of them; FP8 blocks stay FP8 blocks, and what another tool has quantized stays so where a format of ours holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.methods import find_method
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import BLOCK, FP8, ROLE
from pipeline.checkpoint.source import Source, open_source
from pipeline.checkpoint.tensors import DTYPES, MODEL_DTYPES, RawTensor, TensorInfo
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.layouts import Mapping as TensorMapping

FLOAT32 = "F32"


class HubView:
    """A TensorSource under engine names. `dtype` is the network's type, as torch spells it."""

    def __init__(self, folder: CheckpointFolder) -> None:
        """Raises CheckpointError for tensors that are missing, unknown, misshapen or of no type that is read."""
        self._folder: Source = folder
        if find_method(folder) is not None:
            self._folder, found, _, stored = open_source(folder, None, exact=False)
        else:
            found, _ = layout_for(folder.architecture).match(folder.tensors, str(folder.path))
            stored = _pick_type(folder, found)
        self._mappings = {mapping.target: mapping for mapping in found}
        self.dtype = DTYPES[stored][1]
        self.tensors: Mapping[str, TensorInfo] = {
            mapping.target: TensorInfo(mapping.target, self._type(mapping, stored), mapping.target_shape)
            for mapping in found
        }

    def read(self, name: str) -> RawTensor:
        """Over the file's own memory where one tensor of the right type makes the target, else a copy."""
        if name not in self._mappings:
            raise CheckpointError(f"{self._folder.path}: no tensor gives {name}")
        mapping, wanted = self._mappings[name], self.tensors[name].dtype
        parts = [self._folder.read(source) for source in mapping.sources]
        if len(parts) == 1 and parts[0].dtype == wanted:
            return parts[0]
        import torch

        target = getattr(torch, DTYPES[wanted][1])
        return RawTensor.from_torch(mapping.forward([part.to_torch().to(target) for part in parts]).contiguous())

    def release(self, name: str) -> None:
        for source in self._mappings[name].sources:
            self._folder.release(source)

    def _type(self, mapping: TensorMapping, stored: str) -> str:
        types = {self._folder.tensors[source].dtype for source in mapping.sources}
        if not mapping.cast and len(types) == 1:
            return types.pop()
        if types == {FP8}:
            if any(shape[0] % BLOCK for shape in mapping.source_shapes[:-1]):
                raise CheckpointError(
                    f"{self._folder.path}: {' + '.join(mapping.sources)} cannot be one weight in FP8 blocks: their "
                    f"rows are not multiples of {BLOCK}",
                    hint="convert it with stages.convert.dtype: bfloat16, and compare what that wrote",
                )
            return FP8
        return stored


def _pick_type(folder: CheckpointFolder, mappings: list[TensorMapping]) -> str:
    """The one float type of what the model computes with; float32 where there are several."""
    types = Counter(
        folder.tensors[source].dtype
        for mapping in mappings
        if mapping.cast and mapping.role != ROLE
        for source in mapping.sources
        if folder.tensors[source].dtype != FP8
    )
    unknown = types.keys() - MODEL_DTYPES.values()
    if unknown:
        raise CheckpointError(
            f"{folder.path}: weights of the type {min(unknown)}; read are {', '.join(MODEL_DTYPES.values())}",
            hint="take the model's 16-bit weights",
        )
    return next(iter(types)) if len(types) == 1 else FLOAT32
