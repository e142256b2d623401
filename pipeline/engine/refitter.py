"""Hands weights to TensorRT's refitter, one at a time.

The refitter wants whole the weights that the compiler combined (those of one GEMM): until all of them were given, they
wait on the disk, so that host memory does not grow with the model.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.engine.refit_list import RefitList
from pipeline.errors import BuildError, CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.tensors import RawTensor
    from pipeline.network.placeholders import Placeholder


class Refitter(Protocol):
    """What is used of TensorRT's Refitter. A weight's memory must stay as it is until it is refitted, or unset."""

    def get_all_weights(self) -> list[str]: ...

    def get_missing_weights(self) -> list[str]:
        """Weights that must be set too before `refit_cuda_engine` can use those that are."""

    def get_weights_prototype(self, name: str) -> Any:
        """Type and size of a weight, no values."""

    def set_named_weights(self, name: str, weights: Any) -> bool: ...

    def unset_named_weights(self, name: str) -> bool: ...

    def refit_cuda_engine(self) -> bool: ...


class Spool:
    """Bytes that wait on the disk, in a file without a name; mapped, so that they have an address."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in __exit__)
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The same bytes, elsewhere."""
        import numpy as np

        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._file.seek(start)
        self._file.write(data.data)
        self._file.flush()
        self._end = start + data.nbytes
        mapped = mmap.mmap(self._file.fileno(), data.nbytes, access=mmap.ACCESS_READ, offset=start)
        return np.frombuffer(mapped, np.uint8)

    def clear(self) -> None:
        """Gives the disk's room back. Arrays of before must not be read any more."""
        self._end = 0
        self._file.truncate(0)


class WeightBringer:
    """Shown every constant of the network, in any order: gives each to the refitter, once, and refits whenever nothing
    that was given waits for something that was not."""

    def __init__(self, trt: Any, refitter: Refitter, wanted: RefitList, spool: Spool) -> None:
        self._trt, self._refitter, self._spool = trt, refitter, spool
        self._wanted = {constant.name: constant for constant in wanted.constants}
        self._waiting: dict[str, npt.NDArray[np.uint8]] = {}
        self.brought: set[str] = set()
        self.refits = 0
        unknown = sorted(set(refitter.get_all_weights()) ^ self._wanted.keys())
        if unknown:
            raise BuildError(
                f"engine and refit list differ in {len(unknown)} weights, {unknown[0]} among them",
                hint="they are of two builds: build the engine again",
            )

    def __call__(self, placeholder: Placeholder, raw: RawTensor) -> None:
        """Raises CheckpointError for bytes that are not those of the network that was built, BuildError where TensorRT
        does not take them."""
        name = placeholder.name
        check_constant(self._wanted.get(name), placeholder)
        dtype, count = getattr(self._trt, placeholder.dtype), math.prod(placeholder.shape)
        prototype = self._refitter.get_weights_prototype(name)
        if (prototype.dtype, prototype.size) != (dtype, count):
            raise BuildError(
                f"the engine wants {prototype.size} values of {prototype.dtype} for {name}, not {count} of {dtype}",
                hint="engine and refit list are of two builds: build the engine again",
            )
        # Those of a derived constant are gone when this returns; a stored one's stay mapped.
        data = raw.data if placeholder.stored else self._spool.keep(raw.data)
        if not self._refitter.set_named_weights(name, self._trt.Weights(dtype, data.ctypes.data, count)):
            raise BuildError(f"TensorRT does not take the weights {name}", hint="its log says why")
        self._waiting[name] = data
        self.brought.add(name)
        if not self._refitter.get_missing_weights():
            self._refit()

    def finish(self) -> None:
        """Refits what still waits. Raises BuildError where a weight was never shown, or TensorRT refuses."""
        absent = sorted(self._wanted.keys() - self.brought)
        if absent:
            raise BuildError(f"{len(absent)} weights of the engine were not made, {absent[0]} among them")
        if self._waiting:
            self._refit()

    def _refit(self) -> None:
        if not self._refitter.refit_cuda_engine():
            missing = self._refitter.get_missing_weights()
            raise BuildError(
                f"TensorRT refused the refit{f': it lacks {missing[0]}' if missing else ''}", hint="its log says why"
            )
        for name in self._waiting:
            self._refitter.unset_named_weights(name)
        self._waiting.clear()
        self._spool.clear()
        self.refits += 1


def check_constant(wanted: Placeholder | None, made: Placeholder) -> None:
    """Raises CheckpointError where a constant is not the one that the engine was built for."""
    if wanted is None:
        raise BuildError(
            f"the network makes a constant {made.name}, which the engine does not have",
            hint="the engine was built by another version of trtseek: build it again",
        )
    if (made.dtype, made.shape, made.digest) == (wanted.dtype, wanted.shape, wanted.digest):
        return
    first = made.sources[0] if made.sources else "no tensor"
    more = f" and {len(made.sources) - 1} more" if len(made.sources) > 1 else ""
    raise CheckpointError(
        f"constant {made.name}, made of {first}{more}, is not the one that the engine was built for",
        hint="refit from the very checkpoint that was built: engine.json has the digests of its files",
    )
