"""A compiled program: a flat list of steps over numbered slots, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.interpreter.errors import ExecutionError

Values = list[Any]
NOTHING = 0  # the slot of an unconnected input: always None


class Runnable(Protocol):
    """What a plan is made of. done: slots to clear after it. layers: those that it computes, for messages."""

    @property
    def done(self) -> tuple[int, ...]: ...

    @property
    def layers(self) -> tuple[str, ...]: ...

    def run(self, values: Values, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel between its slots."""

    kernel: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    run: Callable[[Values], None]
    layers: tuple[str, ...]
    done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`template` holds the constants in their slots."""

    template: tuple[Any, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]
    steps: tuple[Runnable, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for step in self.steps for layer in step.layers)


def execute(steps: Iterable[Runnable], values: Values) -> None:
    """Raises ExecutionError where a step cannot compute."""
    for step in steps:
        try:
            step.run(values)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise ExecutionError(step.layers[-1], error) from error
        for slot in step.done:
            values[slot] = None


def bind(kernel: Callable[..., Any], reads: tuple[int, ...], writes: tuple[int, ...]) -> Callable[[Values], None]:
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
