"""The experts of one rank, with TensorRT's own layers, lowered in two ways that must agree.

dense   every expert runs on every token and one-hot weights choose: E/k times the work, any number of tokens
gather  each token fetches its k experts' weights: for engines that only generate, since T*k expert matrices are made

Sizes: E experts of this rank, k of all per token, I their width on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import checkpoint_name
from pipeline.network.local import keep_own
from pipeline.network.mlp import swiglu
from pipeline.network.weights import Operand, lower_stack, multiply

Stacks = dict[str, Operand]


def read_stacks(g: Graph, context: Context) -> Stacks:
    """Each linear of all experts of the rank, one stack [E, …]. `g` stands at the layer's experts."""
    hidden, width = context.architecture.hidden_size, context.sizes.expert_columns
    stacks = {}
    for name, out_features, in_features in (("fc", width, hidden), ("gate", width, hidden), ("proj", hidden, width)):
        bases = [f"{checkpoint_name(g, '')}{expert}.{name}" for expert in context.sizes.experts]
        stacks[name] = lower_stack(g.at(name), context.weights, bases, out_features, in_features)
    return stacks


def run_experts(g: Graph, context: Context, stacks: Stacks, x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
    """x [T, H], float32 weights and int32 experts of the whole model [T, k] → [T, H] in float32: this rank's part of
    the weighted sum, to which experts of other ranks add nothing."""
    own = context.sizes.experts
    if context.spec.rank.parallel.expert > 1:
        at = g.at("own")
        indices, inside = keep_own(at, indices, own.start, len(own))
        chosen = at.product("weights", chosen, at.cast("inside_float32", inside, "float32"))
    return LOWERINGS[context.spec.moe](g, stacks, x, chosen, indices)


def _dense(g: Graph, stacks: Stacks, x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
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


def _gather(g: Graph, stacks: Stacks, x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
    """[T, H] in float32, over weights [T, k, in, out]."""

    def apply(name: str, rows: Tensor) -> Tensor:
        return multiply(g, name, rows, stacks[name].choose(g.at(name), indices))

    hidden = x.shape[1]
    rows = g.reshape("input", x, (-1, 1, 1, hidden))
    outputs = apply("proj", swiglu(g, apply("fc", rows), apply("gate", rows)))  # [T, k, 1, H]
    column = g.reshape("weights_column", chosen, (0, 0, 1, 1))
    weighted = g.product("weighted", g.cast("outputs_float32", outputs, "float32"), column)
    return g.reshape("sum_float32", g.reduce("sum_rows", weighted, "SUM", 1, keep=False), (-1, hidden))


LOWERINGS: dict[str, Callable[[Graph, Stacks, Tensor, Tensor, Tensor], Tensor]] = {
    "dense": _dense,
    "gather": _gather,
}
