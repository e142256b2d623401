"""A compiled program: a flat list of steps over numbered slots, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = list[Any]
Step = Callable[[Values], None]
NOTHING = 0  # the slot of an unconnected input: always None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`template` holds the constants in their slots; `steps` are (step, slots to clear after it)."""

    template: tuple[Any, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]
    steps: tuple[tuple[Step, tuple[int, ...]], ...]
    layers: tuple[str, ...]  # the layer of each step, for messages


def bind(kernel: Callable[..., Any], reads: tuple[int, ...], writes: tuple[int, ...]) -> Step:
    """A closure with its slots in it; the common arities spelled out, because a decode step runs hundreds of them."""
    if len(writes) > 1:

        def several(values: Values) -> None:
            for slot, result in zip(writes, kernel(*[values[slot] for slot in reads]), strict=True):
                values[slot] = result

        return several
    (write,) = writes
    if len(reads) == 1:
        (only,) = reads

        def unary(values: Values) -> None:
            values[write] = kernel(values[only])

        return unary
    if len(reads) == 2:
        left, right = reads

        def binary(values: Values) -> None:
            values[write] = kernel(values[left], values[right])

        return binary

    def any_arity(values: Values) -> None:
        values[write] = kernel(*[values[slot] for slot in reads])

    return any_arity
