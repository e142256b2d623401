"""Element by element: elementwise, unary, activation, cast, select, one-hot, fill."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.interpreter.operations import layouts, small
from pipeline.interpreter.operations.site import Kernel, Site


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Integers divide as in C++, towards zero."""
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "sub": torch.sub,
    "div": _divide,
    "pow": torch.pow,
    "floor_div": torch.floor_divide,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "equal": torch.eq,
    "greater": torch.gt,
    "less": torch.lt,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "recip": torch.reciprocal,
    "abs": torch.abs,
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "erf": torch.erf,
    "not": torch.logical_not,
    "sign": torch.sign,
    "round": torch.round,  # both round halves to even
    "isinf": torch.isinf,
    "isnan": torch.isnan,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def compile_elementwise(site: Site) -> Kernel:
    if site.rank(0) != site.rank(1):
        raise site.refuse("inputs differ in rank")
    return small.elementwise(site, site.choose("op", BINARY))


def compile_unary(site: Site) -> Kernel:
    return site.choose("op", UNARY)


def compile_activation(site: Site) -> Kernel:
    activation = site.choose("op", ACTIVATIONS)
    if activation is not torch.sigmoid:
        return activation
    return small.score(site, compile_sigmoid(site), is_sigmoid=True)


def compile_sigmoid(site: Site) -> Callable[[Tensor], Tensor]:
    """In exact mode written out: torch's own rounds differently in what is left of whole vectors, that is, depending on
    how many elements come before."""
    if site.numerics.mode == "exact":
        return lambda x: torch.neg(x).exp_().add_(1.0).reciprocal_()
    return torch.sigmoid


def compile_cast(site: Site) -> Kernel:
    """Between floats a no-op in exact mode, because both types are held in fp32."""
    held = site.held()
    return layouts.cast(site, lambda x: x.to(held))


def compile_select(site: Site) -> Kernel:
    return torch.where


def compile_one_hot(site: Site) -> Kernel:
    """Inputs: indices, [off, on], depth. An index outside the depth sets nothing."""
    rank = site.rank() + 1
    axis = site.axis(rank)

    def one_hot(indices: Tensor, values: Tensor, depth: tuple[int, ...]) -> Tensor:
        classes = torch.arange(depth[0], dtype=indices.dtype)
        hit = indices.unsqueeze(axis) == classes.reshape([-1 if i == axis else 1 for i in range(rank)])
        return torch.where(hit, values[1], values[0])

    return small.one_hot(site, one_hot, axis)


def compile_fill(site: Site) -> Kernel:
    """A ramp of one dimension: alpha + i * beta. Inputs, where connected, override shape, alpha and beta."""
    site.require("op", "linspace")
    if len(site.node.outputs[0].shape) != 1:
        raise site.refuse("of more than one dimension")
    held = site.held()
    defaults = {name: site.attribute(name) for name in ("shape", "alpha", "beta")}
    if any(site.optional(i) is None and default is None for i, default in enumerate(defaults.values())):
        raise site.refuse("shape, alpha or beta is given neither as attribute nor as input")
    length, first, step = (defaults["shape"] or [0])[0], defaults["alpha"], defaults["beta"]

    def fill(shape: tuple[int, ...] | None = None, alpha: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        ramp = torch.arange(length if shape is None else shape[0], dtype=held)
        return (ramp * (step if beta is None else beta) + (first if alpha is None else alpha)).to(held)

    return fill
