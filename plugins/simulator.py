"""Runs an operation's launches on the CPU, in Triton's interpreter: the plan that an engine starts on a GPU.

In a process of its own: Triton decides while it is imported whether kernels are compiled or interpreted. Slow (a
program takes milliseconds): for small shapes. Its casts from fp32 are not the GPU's: bfloat16 is cut off, FP8 may be a
step off; and it cannot multiply bfloat16 matrices. fp32 and fp16 are exact.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from plugins.operation import Input, Operation, Result, Scratch, resolve

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Packed = tuple[str, tuple[int, ...], "npt.NDArray[np.uint8]"]
FILL = 0x7F  # of memory that nothing has written yet: NaN in FP8, huge numbers elsewhere


class Simulator:
    """Holds the process; closed by `close`, or at the end of a with statement."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare
        )

    def run(self, operation: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, in memory of their own: inputs that are updated stay as they were. Raises what the kernel
        raises."""
        packed = self._pool.submit(_run, operation, [_pack(tensor) for tensor in inputs]).result()
        return tuple(_unpack(tensor) for tensor in packed)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _run(operation: Operation, packed: list[Packed]) -> list[Packed]:
    import torch

    torch.set_num_threads(1)
    inputs = [_unpack(tensor) for tensor in packed]
    shapes = [tuple(tensor.shape) for tensor in inputs]
    outputs = []
    for output in operation.outputs():
        shape = resolve(output, shapes)
        dtype = _type(output.dtype)
        fresh = torch.full((torch.Size(shape).numel() * dtype.itemsize,), FILL, dtype=torch.uint8)
        outputs.append(fresh.view(dtype).reshape(shape) if output.updates is None else inputs[output.updates])
    scratch = torch.full((max(operation.scratch_bytes(shapes), 1),), FILL, dtype=torch.uint8)
    for launch in operation.launches(shapes):
        function = getattr(importlib.import_module(launch.kernel.module), launch.kernel.function)
        arguments = dict(launch.kernel.constants)
        for (name, kind), argument in zip(launch.kernel.parameters, launch.arguments, strict=True):
            arguments[name] = _argument(argument, kind, inputs, outputs, scratch)
        function[launch.grid](*[arguments[name] for name in function.arg_names])
    return [_pack(tensor) for tensor in outputs]


def _argument(
    argument: object, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], scratch: torch.Tensor
) -> Any:
    import torch

    if isinstance(argument, Input):
        return inputs[argument.index]
    if isinstance(argument, Result):
        return outputs[argument.index]
    if isinstance(argument, Scratch):
        rest = scratch[argument.offset :]
        dtype = {"*fp32": torch.float32, "*i32": torch.int32}[kind]
        return rest[: len(rest) // 4 * 4].view(dtype)
    return argument


def _type(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return found


def _pack(tensor: torch.Tensor) -> Packed:
    import torch

    name = "fp8" if tensor.dtype is torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _unpack(packed: Packed) -> torch.Tensor:
    import torch

    name, shape, data = packed
    return torch.from_numpy(data.copy()).view(_type(name)).reshape(shape)
