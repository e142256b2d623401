"""Kernels in C that follow one another, made by one call.

A step that decodes a few rows is a hundred kernels and more of some microseconds each: Python between them takes as
long as many of them, and the other threads go to sleep and have to be woken. So for inputs of a form that came before,
the calls are laid out once, on memory that stays, and made at once by one team of threads. That memory is of all tapes
of a plan, of which one runs at a time and leaves nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pipeline.interpreter.errors import ExecutionError
from pipeline.interpreter.native import Calls
from pipeline.interpreter.native.kernel import NativeKernel
from pipeline.interpreter.plan import Runnable, Step, Values, execute

MOST_COPIED = 1 << 22  # bytes of an input; a larger one is read where it lies, which is another place at every step
ARENA = 1 << 26  # bytes that layouts compute in; those that are never written to are no memory
ALIGNED = 64  # bytes
MOST_LAYOUTS = 64  # of a tape, of the forms that came last; a server's batches change at every step
MOST_KNOWN = 1 << 10  # forms of which none can be made, that are remembered


class Memory:
    """What a layout computes in: a tensor's place is used again once nobody reads it any more. nbytes: of the arena;
    more than it has where not all found a place there."""

    def __init__(self, arena: Tensor) -> None:
        self.nbytes = 0
        self._arena = arena
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}
        self._taken: list[Tensor] = []

    @property
    def is_enough(self) -> bool:
        return self.nbytes <= len(self._arena)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        free = self._free.get((tuple(shape), dtype))
        tensor = free.pop() if free else self._place(shape, dtype)
        self._taken.append(tensor)
        return tensor

    def _place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        first, count = self.nbytes, math.prod(shape) * dtype.itemsize
        self.nbytes += -(-count // ALIGNED) * ALIGNED
        if not self.is_enough:
            return torch.empty(shape, dtype=dtype)
        return self._arena[first : first + count].view(dtype).view(tuple(shape))

    def taken(self) -> list[Tensor]:
        """Since it was last asked for."""
        taken, self._taken = self._taken, []
        return taken

    def release(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Calls on the arena, each of a layer. copies: for each tensor of the inputs its place, or None where it is read
    where it lies. results: the slots that others read, with the tensor there, or the slot of the input that it is."""

    calls: Calls
    layers: tuple[str, ...]
    refusals: tuple[str, ...]
    copies: tuple[Tensor | None, ...]
    results: tuple[tuple[int, Tensor | int], ...]


Form = tuple[Any, ...]  # all of the inputs that a layout depends on


class Tape:
    """Steps with a NativeKernel each. One run at a time.

    template: the plan's constants, by slot. wanted: slots that other steps read later. arena: bytes to compute in.
    """

    def __init__(self, steps: Sequence[Step], template: Sequence[Any], wanted: set[int], arena: Tensor) -> None:
        self._alone, self._arena = tuple(steps), arena
        self._steps = tuple((step, step.kernel) for step in steps if isinstance(step.kernel, NativeKernel))
        self.layers = tuple(layer for step in steps for layer in step.layers)
        self.done = tuple(slot for step in steps for slot in step.done)
        written = dict.fromkeys(slot for step in steps for slot in step.writes)
        reads = dict.fromkeys(slot for step in steps for slot in step.reads)
        self._inputs = tuple(slot for slot in reads if slot not in written and template[slot] is None)
        self._wanted = tuple(slot for slot in written if slot in wanted)
        self._updated = {step.reads[index] for step, kernel in self._steps for index in kernel.updates}
        last = {slot: index for index, step in enumerate(steps) for slot in (*step.writes, *step.reads)}
        kept = set(wanted)
        for step, kernel in reversed(self._steps):
            if kernel.shares:  # what is read of its outputs is memory of its inputs
                kept.update(step.reads if not kept.isdisjoint(step.writes) else ())
                ends = max(last[slot] for slot in step.writes)
                last.update({slot: max(last[slot], ends) for slot in step.reads})
        self._lasts: dict[int, list[int]] = {}  # step: those whose outputs nobody reads after it
        for index, step in enumerate(steps):
            if kept.isdisjoint(step.writes):
                self._lasts.setdefault(max(last[slot] for slot in step.writes), []).append(index)
        self._layouts: dict[Form, Layout] = {}  # the one that was used last is the last
        self._others: set[Form] = set()

    def run(self, values: Values) -> None:
        form, inputs = [], []
        for slot in self._inputs:
            for tensor in _tensors(values[slot]):
                inputs.append(tensor)
                form.append(None if tensor is None else self._form(slot, tensor))
        layout = self._find(tuple(form), values)
        if layout is None:
            execute(self._alone, values)
            return
        for place, tensor in zip(layout.copies, inputs, strict=True):
            if place is not None and tensor is not None:
                place.copy_(tensor)
        refused = layout.calls.run()
        if refused is not None:
            raise ExecutionError(layout.layers[refused], IndexError(layout.refusals[refused]))
        for slot, result in layout.results:
            values[slot] = result.clone() if isinstance(result, Tensor) else values[result]

    def _find(self, form: Form, values: Values) -> Layout | None:
        if form in self._others:
            return None
        layout = self._layouts.pop(form, None) or self._lay_out(values)
        if layout is not None:
            self._layouts[form] = layout
            if len(self._layouts) > MOST_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        elif len(self._others) < MOST_KNOWN:
            self._others.add(form)
        return layout

    def _form(self, slot: int, tensor: Tensor) -> Form:
        if self._lies(slot, tensor):
            return tensor.shape, tensor.dtype, tensor.stride(), tensor.data_ptr()
        return tensor.shape, tensor.dtype

    def _lies(self, slot: int, tensor: Tensor) -> bool:
        """Whether it is read, or written, where it lies."""
        return slot in self._updated or tensor.nbytes > MOST_COPIED

    def _lay_out(self, values: Values) -> Layout | None:
        """None where a kernel does not take such inputs, or the arena does not hold what they compute."""
        known, copies, memory = dict(enumerate(values)), list[Tensor | None](), Memory(self._arena)
        lying: dict[int, int] = {}  # slots of tensors that are used where they lie, by identity
        storages = set[int]()  # of those
        for slot in self._inputs:
            places = []
            for tensor in _tensors(values[slot]):
                if tensor is None or self._lies(slot, tensor):
                    lying[id(tensor)] = slot
                    storages.update([] if tensor is None else [_storage(tensor)])
                    copies.append(None)
                else:
                    copies.append(memory.empty(tensor.shape, tensor.dtype))
                places.append(tensor if copies[-1] is None else copies[-1])
            known[slot] = tuple(places) if isinstance(values[slot], tuple) else places[0]
        memory.taken()  # copies stay
        calls, layers, taken = [], [], list[list[Tensor]]()
        for index, (step, kernel) in enumerate(self._steps):
            try:
                call = kernel.plan(memory.empty, *[known[slot] for slot in step.reads])
            except Exception as error:
                raise ExecutionError(step.layers[-1], error) from error
            if call is None or not memory.is_enough:
                return None
            outputs = call.outputs if len(step.writes) > 1 else (call.outputs,)
            known.update(zip(step.writes, outputs, strict=True))
            if call.kernel is not None:
                calls.append(call)
                layers.append(step.layers[-1])
            taken.append(memory.taken())
            for other in self._lasts.get(index, ()):
                memory.release(taken[other])
        results = [known[slot] for slot in self._wanted]
        # A view of what lies elsewhere at the next step would keep that memory, for a layout that never comes again.
        if not calls or any(_storage(result) in storages and id(result) not in lying for result in results):
            return None
        laid_out = kernel.library.lay_out(calls, memory.empty)
        if not memory.is_enough:
            return None
        return Layout(
            calls=laid_out,
            layers=tuple(layers),
            refusals=tuple(call.refusal for call in calls),
            copies=tuple(copies),
            results=tuple(
                (slot, lying.get(id(result), result)) for slot, result in zip(self._wanted, results, strict=True)
            ),
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> tuple[Tensor | None, ...]:
    return value if isinstance(value, tuple) else (value,)


def join_native(steps: Sequence[Step], template: Sequence[Any], wanted: set[int]) -> Iterator[Runnable]:
    """The same steps, those with a NativeKernel that follow one another as a Tape. wanted: slots of the plan's
    outputs."""
    last = {slot: index for index, step in enumerate(steps) for slot in step.reads}
    arena = torch.empty(ARENA, dtype=torch.uint8)
    index = 0
    for native, group in groupby(steps, lambda step: isinstance(step.kernel, NativeKernel)):
        run = list(group)
        index += len(run)
        later = wanted | {slot for slot, reader in last.items() if reader >= index}
        calls = [step for step in run if native and not getattr(step.kernel, "shares", False)]
        yield from [Tape(run, template, later, arena)] if calls and len(run) > 1 else run
