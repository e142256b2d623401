"""Runs an operation's launches on the CPU, in Triton's interpreter: the plan that an engine starts on a GPU.

In a process of its own: Triton decides while it is imported whether kernels are compiled or interpreted. Slow (a
program takes milliseconds): for small shapes. Casts and products are those of a GPU, but for the order of sums.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from plugins.interpreted import mend_interpreter
from plugins.operation import POINTERS, Argument, Exchange, Input, Launch, Memory, Operation, Scratch, resolve

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Packed = tuple[str, tuple[int, ...], "npt.NDArray[np.uint8]"]
_TYPES = {pointer: name for name, pointer in POINTERS.items()}
FILL = 0x7F  # of memory that nothing has written yet: NaN in FP8, huge numbers elsewhere


class Simulator:
    """Holds the process; closed by `close`, or at the end of a with statement."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare
        )

    def run(self, operation: Operation, inputs: Sequence[torch.Tensor], sm: int = 90) -> tuple[torch.Tensor, ...]:
        """The outputs, in memory of their own: inputs that are updated stay as they were. sm: which a kernel is told
        that asks. Raises CompatibilityError for inputs that are not dense, and what the kernel raises."""
        return self.run_ranks(operation, [inputs], sm)[0]

    def run_ranks(
        self, operation: Operation, inputs: Sequence[Sequence[torch.Tensor]], sm: int = 90
    ) -> list[tuple[torch.Tensor, ...]]:
        """The outputs of each rank of a group, given its inputs: all step together, and exchange from memory to
        memory."""
        for own in inputs:
            operation.check_dense(own)
        packed = [[_pack(tensor) for tensor in own] for own in inputs]
        return [tuple(map(_unpack, own)) for own in self._pool.submit(_run, operation, packed, sm).result()]

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    mend_interpreter()


class _Rank:
    """A rank's memory."""

    def __init__(self, operation: Operation, packed: list[Packed]) -> None:
        import torch

        self.inputs = [_unpack(tensor) for tensor in packed]
        self.shapes = [tuple(tensor.shape) for tensor in self.inputs]
        self.outputs = []
        for output in operation.outputs():
            shape, dtype = resolve(output, self.shapes), _type(output.dtype)
            if output.updates is None:
                fresh = torch.full((torch.Size(shape).numel() * dtype.itemsize,), FILL, dtype=torch.uint8)
                self.outputs.append(fresh.view(dtype).reshape(shape))
            else:
                self.outputs.append(self.inputs[output.updates])
        self.scratch = torch.full((max(operation.scratch_bytes(self.shapes), 1),), FILL, dtype=torch.uint8)

    def locate(self, memory: Memory) -> torch.Tensor:
        """As bytes, to its end."""
        import torch

        if isinstance(memory, Scratch):
            return self.scratch[memory.offset :]
        if isinstance(memory, Input):
            return self.inputs[memory.index].view(-1).view(torch.uint8)
        return self.outputs[memory.index].view(-1).view(torch.uint8)[memory.offset :]

    def launch(self, launch: Launch, sm: int) -> None:
        function = getattr(importlib.import_module(launch.kernel.module), launch.kernel.function)
        arguments = {"SM": sm, **dict(launch.kernel.constants)}
        for (name, kind), argument in zip(launch.kernel.parameters, launch.arguments, strict=True):
            arguments[name] = self._argument(argument, kind)
        function[launch.grid](*[arguments[name] for name in function.arg_names])

    def _argument(self, argument: Argument, kind: str) -> Any:
        if not isinstance(argument, Memory):
            return argument
        dtype, rest = _type(_TYPES[kind]), self.locate(argument)
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


def _run(operation: Operation, packed: list[list[Packed]], sm: int) -> list[list[Packed]]:
    import torch

    torch.set_num_threads(1)
    ranks = [_Rank(operation, own) for own in packed]
    for steps in zip(*(operation.launches(rank.shapes) for rank in ranks), strict=True):
        for rank, step in zip(ranks, steps, strict=True):
            if isinstance(step, Launch):
                rank.launch(step, sm)
        if isinstance(steps[0], Exchange):
            _exchange(steps[0], ranks)
    return [[_pack(tensor) for tensor in rank.outputs] for rank in ranks]


def _exchange(step: Exchange, ranks: list[_Rank]) -> None:
    """Every rank's rows are taken before any is written. Where there is only one, all its rows are for itself."""
    import torch

    sent = []
    for rank in ranks:
        goes = [1] * step.ranks
        if step.counts is not None:
            counts = rank.locate(step.counts).view(torch.int32)
            goes = counts.view(2, -1)[int(step.reverse)].tolist()
        sizes = [count * step.row_bytes for count in goes]
        sent.append([part.clone() for part in torch.split(rank.locate(step.source)[: sum(sizes)], sizes)])
    for index, rank in enumerate(ranks):
        came = torch.cat([parts[index] for parts in sent] if len(ranks) > 1 else sent[0])
        rank.locate(step.target)[: len(came)] = came


def _type(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return found


def _pack(tensor: torch.Tensor) -> Packed:
    import torch

    name = "fp8" if tensor.dtype is torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy()


def _unpack(packed: Packed) -> torch.Tensor:
    import torch

    name, shape, data = packed
    # numpy may say that nothing at all has strides of 0, which torch takes for no bytes in a row.
    held = torch.empty(len(data), dtype=torch.uint8)
    held.copy_(torch.from_numpy(data))
    return held.view(_type(name)).reshape(shape)
