"""A program's constants as torch tensors, prepared once where they fit a budget, at each use where they do not.

Preparing means widening to fp32 (exact mode), unpacking INT4, dequantizing, or packing for a matrix kernel. A constant
that the mode reads as it is stored costs nothing: it stays a view of its file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.interpreter.operations.products import unpack_int4

if TYPE_CHECKING:
    import torch

    from pipeline.interpreter.numerics import Numerics
    from pipeline.network.program import Program

ALWAYS = 1 << 16  # bytes of a constant that is prepared whatever the budget: norms, scales, scalars


class Constants:
    """`budget`: bytes that prepared copies may hold in all (None: no limit)."""

    def __init__(self, program: Program, numerics: Numerics, budget: int | None) -> None:
        self._program, self._numerics, self._budget = program, numerics, budget
        self._prepared: dict[tuple[str, str], torch.Tensor] = {}
        self._names: set[str] = set()
        self.prepared_bytes = 0

    def stored(self, name: str) -> torch.Tensor:
        """As stored, without a copy; INT4 still packed."""
        spec, stored = self._program.constant_specs[name], self._program.constants[name].to_torch()
        return stored if spec.dtype == "int4" else stored.reshape(spec.shape)

    def load(self, name: str, entry: int | None = None) -> torch.Tensor:
        """In the mode's type: a view of the file where that is the stored type, a new tensor otherwise. `entry`: only
        that one along the first dimension, which stays."""
        spec, stored = self._program.constant_specs[name], self.stored(name)
        shape = spec.shape
        if entry is not None:
            stored, shape = stored[entry : entry + 1], (1, *shape[1:])
        if spec.dtype == "int4":
            return unpack_int4(stored, shape)
        return stored.to(self._numerics.held(spec.dtype))

    def is_free(self, name: str) -> bool:
        """Whether loading copies nothing."""
        spec = self._program.constant_specs[name]
        return spec.dtype != "int4" and self.stored(name).dtype == self._numerics.held(spec.dtype)

    def keeps(self, name: str, nbytes: int) -> bool:
        """Whether a prepared tensor of this size may stay: it is here already, is small, or fits what is left."""
        if name in self._names or nbytes <= ALWAYS or self._budget is None:
            return True
        return self.prepared_bytes + nbytes <= self._budget

    def prepare(self, name: str, form: str, make: Callable[[], torch.Tensor], *, costs: bool = True) -> torch.Tensor:
        """Makes a form of a tensor once ("plain", "packed" …), for every plan of this program."""
        key = (name, form)
        if key not in self._prepared:
            tensor = make()
            self._prepared[key] = tensor
            self._names.add(name)
            # A packed tensor is opaque to torch's nbytes; its elements are not.
            self.prepared_bytes += tensor.numel() * tensor.element_size() if costs else 0
        return self._prepared[key]
