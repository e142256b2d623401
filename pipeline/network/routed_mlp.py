"""Routed experts (DeepSeekMoE) with TensorRT's own layers, lowered in two ways that must agree.

dense   every expert runs on every token and one-hot weights choose: E/k times the work, any number of tokens
gather  each token fetches its k experts' weights: for engines that only generate, since T*k expert matrices are made

Sizes: E experts, k of them per token, I their width.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.errors import CompatibilityError
from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import checkpoint_name
from pipeline.network.mlp import gated_mlp, swiglu
from pipeline.network.router import route
from pipeline.network.weights import Operand, lower_stack, multiply


def routed_mlp(g: Graph, context: Context, x: Tensor) -> Tensor:
    """x [T, H] → [T, H]: the chosen experts' weighted sum, and the shared experts."""
    a, experts = context.architecture, context.architecture.experts
    if experts is None:
        raise CompatibilityError(f"{a.name} has no routed experts", hint="config.json lacks n_routed_experts")
    chosen, indices = route(g, context.weights, experts, x, a.hidden_size)
    at, width = g.at("experts"), experts.intermediate_size
    stacks = {
        name: _stack(at, context, name, experts.num_routed, *sizes)
        for name, sizes in (
            ("fc", (width, a.hidden_size)),
            ("gate", (width, a.hidden_size)),
            ("proj", (a.hidden_size, width)),
        )
    }
    wide = LOWERINGS[context.spec.moe](at, stacks, x, chosen, indices)
    routed = at.cast("sum", wide, g.dtype)
    if not experts.num_shared:
        return routed
    shared = gated_mlp(
        g.at("shared_expert"), context.weights, x, a.hidden_size, width * experts.num_shared, bias=a.mlp_bias
    )
    return g.sum("sum", routed, shared)


def _stack(g: Graph, context: Context, name: str, count: int, out_features: int, in_features: int) -> Operand:
    """One linear of all experts."""
    bases = [f"{checkpoint_name(g, '')}{expert}.{name}" for expert in range(count)]
    return lower_stack(g.at(name), context.weights, bases, out_features, in_features)


def _dense(g: Graph, stacks: dict[str, Operand], x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
    """[T, H] in float32. x is seen as [1, T, H] and broadcast over the experts."""
    experts, hidden = stacks["fc"].weight.shape[0], x.shape[1]
    rows = g.reshape("input", x, (1, -1, hidden))
    gated = swiglu(g, multiply(g, "fc", rows, stacks["fc"]), multiply(g, "gate", rows, stacks["gate"]))
    outputs = multiply(g, "proj", gated, stacks["proj"])  # [E, T, H]
    one_hot = g.one_hot("one_hot", indices, experts)
    column = g.reshape("weights_column", chosen, (0, 0, 1))
    weights = g.reduce("weights", g.product("weighted_one_hot", one_hot, column), "SUM", 1, keep=False)  # [T, E]
    by_expert = g.reshape("weights_by_expert", weights, (experts, -1, 1), first=(1, 0))
    weighted = g.product("weighted", g.cast("outputs_float32", outputs, "float32"), by_expert)
    return g.reduce("sum_float32", weighted, "SUM", 0, keep=False)


def _gather(g: Graph, stacks: dict[str, Operand], x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
    """[T, H] in float32, over weights [T, k, in, out]."""

    def apply(name: str, rows: Tensor) -> Tensor:
        return multiply(g, name, rows, stacks[name].choose(g.at(name), indices))

    hidden = x.shape[1]
    rows = g.reshape("input", x, (-1, 1, 1, hidden))
    outputs = apply("proj", swiglu(g, apply("fc", rows), apply("gate", rows)))  # [T, k, 1, H]
    column = g.reshape("weights_column", chosen, (0, 0, 1, 1))
    weighted = g.product("weighted", g.cast("outputs_float32", outputs, "float32"), column)
    return g.reshape("sum_float32", g.reduce("sum_rows", weighted, "SUM", 1, keep=False), (-1, hidden))


LOWERINGS: dict[str, Callable[[Graph, dict[str, Operand], Tensor, Tensor, Tensor], Tensor]] = {
    "dense": _dense,
    "gather": _gather,
}
