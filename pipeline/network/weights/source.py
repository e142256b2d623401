"""The tensors of an engine checkpoint, checked against what the architecture says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import find_format
from pipeline.checkpoint.tensors import MODEL_DTYPES, RawTensor, TensorSource
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.network.derived import Derived

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Reads an engine checkpoint for a network of type `dtype`."""

    source: TensorSource
    dtype: str

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def forbid(self, name: str) -> None:
        """Raises CheckpointError if the tensor is there: the network would silently leave it out."""
        if self.has(name):
            raise CheckpointError(
                f"tensor {name} is there, but config.json says that the layer has none",
                hint="config.json and the tensors are of different models",
            )

    def find_format(self, base: str) -> str | None:
        """The format that a linear is stored in; None for plain weights."""
        return find_format(self.source.tensors, base)

    def check(self, name: str, shape: Sequence[int], *, dtypes: Sequence[str] = ()) -> str:
        """The tensor's type. Raises CheckpointError if it is missing or of another shape, CompatibilityError if of
        another type than the network's (or than `dtypes`)."""
        info = self.source.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing", hint="convert the checkpoint again")
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} has shape {list(info.shape)}, the architecture says {list(shape)}",
                hint="config.json and the tensors are of different models",
            )
        allowed = tuple(dtypes) or (MODEL_DTYPES[self.dtype],)
        if info.dtype not in allowed:
            raise CompatibilityError(
                f"tensor {name} is {info.dtype}, a {self.dtype} network takes {' or '.join(allowed)}",
                hint="set stages.convert.dtype, or the network's dtype to the checkpoint's",
            )
        return info.dtype

    def read(self, name: str, shape: Sequence[int], *, dtypes: Sequence[str] = ()) -> RawTensor:
        """The tensor over its file's own memory. Raises as `check` does."""
        self.check(name, shape, dtypes=dtypes)
        return self.source.read(name)

    def read_stack(self, names: Sequence[str], shape: Sequence[int], *, dtypes: Sequence[str] = ()) -> Derived:
        """Tensors of one type and shape, which a file holds apart, as one [E, …]."""
        types = {self.check(name, shape, dtypes=dtypes) for name in names}  # refused now, not when bytes are made
        if len(types) > 1:
            raise CompatibilityError(
                f"{names[0]} and others of its layer are {' and '.join(sorted(types))}",
                hint="convert the checkpoint again",
            )

        def pieces() -> Iterator[npt.NDArray[np.uint8]]:
            for name in names:
                yield self.read(name, shape, dtypes=dtypes).data

        return Derived(types.pop(), (len(names), *shape), pieces)
