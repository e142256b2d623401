"""A node's kernel in C, beside the one in torch for what the former does not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipeline.interpreter.native import Call, Library


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernel:
    """Called with a node's inputs, as every kernel.

    plan: from the inputs, the call that computes the node: it makes room for outputs and computes nothing, and what
    it decides depends on types, shapes and strides alone. None: the call does not take them, and `otherwise` does.
    updates: inputs that it writes to.
    """

    library: Library
    plan: Callable[..., Call | None]
    otherwise: Callable[..., Any]
    updates: tuple[int, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        call = self.plan(*inputs)
        if call is None:
            dense = [_dense(value) for value in inputs]  # held until the call is made
            call = self.plan(*dense)
        if call is None:
            return self.otherwise(*inputs)
        if self.library.lay_out((call,)).run() is not None:
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

    def plan(*inputs: Any) -> Call | None:
        call = plan_inner(*before(*inputs))
        return None if call is None else replace(call, outputs=after(call.outputs))

    return replace(kernel, plan=plan, otherwise=otherwise)


def _dense(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
