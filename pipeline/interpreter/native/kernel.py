"""A node's kernel in C, beside the one in torch for what the former does not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, Library

Empty = Callable[..., Tensor]  # shape, dtype=… → a tensor of whatever content


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernel:
    """Called with a node's inputs, as every kernel.

    plan(empty, *inputs): the call that computes the node, with room for its outputs that `empty` made. It computes
    nothing, and what it decides depends on types, shapes and strides alone. None: the call does not take such inputs,
    and `otherwise` does.
    updates: inputs that it writes to. shares: whether outputs may be memory of inputs that it does not write to.
    """

    library: Library
    plan: Callable[..., Call | None]
    otherwise: Callable[..., Any]
    updates: tuple[int, ...] = ()
    shares: bool = False

    def __call__(self, *inputs: Any) -> Any:
        call = self.plan(torch.empty, *inputs)
        if call is None:
            dense = [_dense(value) for value in inputs]  # held until the call is made
            call = self.plan(torch.empty, *dense)
        if call is None:
            return self.otherwise(*inputs)
        if call.kernel is not None and self.library.lay_out((call,)).run() is not None:
            raise IndexError(call.refusal)
        return call.outputs


def adapt(
    kernel: Callable[..., Any], before: Callable[..., tuple[Any, ...]], after: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A kernel, native or not, for other inputs, of which `before` makes its own, and seen by `after`: both give the
    same memory in another form."""

    def otherwise(*inputs: Any) -> Any:
        return after((kernel.otherwise if isinstance(kernel, NativeKernel) else kernel)(*before(*inputs)))

    if not isinstance(kernel, NativeKernel):
        return otherwise
    plan_inner = kernel.plan

    def plan(empty: Empty, *inputs: Any) -> Call | None:
        call = plan_inner(empty, *before(*inputs))
        return None if call is None else replace(call, outputs=after(call.outputs))

    return replace(kernel, plan=plan, otherwise=otherwise)


def view(outputs: Any) -> Call:
    """What costs nothing: inputs in another shape."""
    return Call(kernel=None, arguments=(), outputs=outputs)


def _dense(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
