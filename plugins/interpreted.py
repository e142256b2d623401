# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Mends Triton's interpreter where it is not what a GPU does: its casts cut off or round up, a GPU's go to the nearest,
ties to even; and bfloat16, which it keeps as integers, is multiplied as such."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """For the whole process, before a kernel runs in it."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def convert(data, source, target, _rounding):
        held = torch.from_numpy(np.ascontiguousarray(data)).view(types[source])
        made = held.to(types[target])
        return made.view(bits[made.element_size()]).numpy()

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        def widen(x: Any) -> Any:
            return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

        return multiply(self, widen(a), widen(b), *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
