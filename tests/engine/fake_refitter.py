"""TensorRT's Refitter, as its documentation describes it, over memory instead of a GPU: what a refit is tested against.

Like the real one it takes names, types, sizes and addresses, reads the memory only when it refits, and refuses what it
does not know. `together` are the weights that the compiler combined: set in part, the rest of them are missing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.network.placeholders import Placeholder


@dataclass(frozen=True)
class Weights:
    """trt.Weights, whose address the bindings do not give back for INT4."""

    dtype: Any
    address: int = 0
    size: int = 0


class TrtWithWeights:
    """The real module, but for Weights."""

    def __init__(self, trt: Any) -> None:
        self._trt, self.Weights = trt, Weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)


class FakeRefitter:
    def __init__(
        self, trt: Any, constants: Iterable[Placeholder], *, together: Iterable[set[str]] = (), at_once: bool = False
    ) -> None:
        constants = list(constants)
        self.nbytes = {constant.name: constant.nbytes for constant in constants}
        self.prototypes = {c.name: Weights(getattr(trt, c.dtype), size=math.prod(c.shape)) for c in constants}
        self.groups = [set(self.nbytes)] if at_once else [*together]
        self.offered: list[str] = []
        self.set_now: dict[str, int] = {}  # name -> address
        self.most_set = 0
        self.taken: dict[str, bytes] = {}

    def get_all_weights(self) -> list[str]:
        return list(self.prototypes)

    def get_missing_weights(self) -> list[str]:
        missing: set[str] = set()
        for group in self.groups:
            if group & self.set_now.keys():
                missing |= group - self.set_now.keys()
        return sorted(missing)

    def get_weights_prototype(self, name: str) -> Weights:
        return self.prototypes[name]

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        known = self.prototypes.get(name)
        if known is None or (weights.dtype, weights.size) != (known.dtype, known.size):
            return False
        self.offered.append(name)
        self.set_now[name] = weights.address
        self.most_set = max(self.most_set, len(self.set_now))
        return True

    def unset_named_weights(self, name: str) -> bool:
        return self.set_now.pop(name, None) is not None

    def refit_cuda_engine(self) -> bool:
        if self.get_missing_weights():
            return False
        for name, address in self.set_now.items():
            self.taken[name] = ctypes.string_at(address, self.nbytes[name])
        return True
