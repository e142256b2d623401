"""What an operation sees of the place where it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pipeline.interpreter.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from pipeline.interpreter.numerics import Numerics
    from pipeline.network.program import Node, TensorSpec

Kernel = Callable[..., Any]
Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One node about to be compiled: its attributes, what its inputs are declared as, and those that are constants."""

    node: Node
    inputs: tuple[TensorSpec | None, ...]
    numerics: Numerics
    # An input's value where it is known now and may be kept (None where it arrives at run time), in the mode's type.
    constant: Callable[[int], torch.Tensor | None]
    # count, part: the entries along the first dimension of an input that depends on constants only, and one of them
    # made anew, [1, …]; None where it cannot be had in parts.
    parts: Callable[[int], tuple[int, Callable[[int], torch.Tensor]] | None]
    # prepare(index, form, nbytes, make): what `make` makes of that constant, made once for all plans of the program;
    # None where so many bytes may not be kept.
    prepare: Callable[[int, str, int, Callable[[], torch.Tensor]], torch.Tensor | None]
    unread: set[int] = field(default_factory=set)  # inputs of the node that the kernel says it never reads

    def part(self, *indices: int) -> Site:
        """As if the node had only these inputs, in this order."""
        return replace(
            self,
            node=replace(self.node, inputs=tuple(self.node.inputs[index] for index in indices)),
            inputs=tuple(self.inputs[index] for index in indices),
            constant=lambda index: self.constant(indices[index]),
            parts=lambda index: self.parts(indices[index]),
            prepare=lambda index, form, nbytes, make: self.prepare(indices[index], form, nbytes, make),
        )

    def refuse(self, problem: str) -> UnsupportedLayerError:
        return UnsupportedLayerError(self.node.name, f"{self.node.kind}: {problem}")

    def attribute(self, name: str) -> Any:
        if name not in self.node.attributes:
            raise self.refuse(f"attribute {name} is missing")
        return self.node.attributes[name]

    def choose(self, name: str, table: Mapping[str, Choice]) -> Choice:
        """The table's entry for an attribute that names one of a few things."""
        value = self.attribute(name)
        if value not in table:
            raise self.refuse(f"{name} {value!r} is not executed (known: {', '.join(table)})")
        return table[value]

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses an attribute value that the operation does not implement."""
        if (value := self.attribute(name)) not in allowed:
            raise self.refuse(f"{name} {value!r} is not executed")

    def rank(self, index: int = 0) -> int:
        return len(self.spec(index).shape)

    def spec(self, index: int) -> TensorSpec:
        if (spec := self.optional(index)) is None:
            raise self.refuse(f"input {index} is missing")
        return spec

    def optional(self, index: int) -> TensorSpec | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def held(self, output: int = 0) -> torch.dtype:
        """The torch type that holds an output in this mode."""
        return self.numerics.held(self.node.outputs[output].dtype)

    def axes(self) -> list[int]:
        """The `axes` attribute: dimensions of input 0."""
        axes = [int(axis) for axis in self.attribute("axes")]
        if not axes or not all(0 <= axis < self.rank() for axis in axes):
            raise self.refuse(f"axes {axes} do not fit rank {self.rank()}")
        return axes

    def axis(self, rank: int | None = None) -> int:
        """The `axis` attribute, from the front; of input 0 unless another rank is given."""
        axis, rank = int(self.attribute("axis")), self.rank() if rank is None else rank
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} does not fit rank {rank}")
        return axis % rank
