"""A routed MLP (DeepSeekMoE): the router, the experts that it chooses, and the shared ones beside them.

Over several ranks each adds a part: its experts, its columns of them or both, for the tokens that chose them, and its
columns of the shared experts. One sum over the tensor ranks makes both whole.
"""

from __future__ import annotations

from functools import partial

from pipeline.errors import CompatibilityError
from pipeline.network.context import Context
from pipeline.network.exchange import exchange_tokens
from pipeline.network.expert_plugin import EXPERTS, run_expert_plugin
from pipeline.network.experts import read_stacks, run_experts
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import add_bias, multiply_linear
from pipeline.network.mlp import gate
from pipeline.network.router import route


def routed_mlp(g: Graph, context: Context, x: Tensor) -> Tensor:
    """x [T, H] → [T, H]: the chosen experts' weighted sum, and the shared experts."""
    a, experts, rank = context.architecture, context.architecture.experts, context.spec.rank
    if experts is None:
        raise CompatibilityError(f"{a.name} has no routed experts", hint="config.json lacks n_routed_experts")
    chosen, indices = route(g, context.weights, experts, x, a.hidden_size)
    at = g.at("experts")
    if EXPERTS in context.spec.lowering.plugins():
        run = partial(run_expert_plugin, at, context)
    else:
        run = partial(run_experts, at, context, read_stacks(at, context))
    spread = rank.parallel.expert > 1
    wide = exchange_tokens(at, context, x, chosen, indices, run) if spread else run(x, chosen, indices)
    total = at.cast("sum", wide, g.dtype)
    if not experts.num_shared:
        return g.all_reduce("all_reduce", total, rank.tensor_group)
    shared, width = g.at("shared_expert"), context.sizes.shared_columns
    gated = gate(shared, context, x, width)
    part = multiply_linear(shared, context.weights, "proj", gated, a.hidden_size, width, bias=a.mlp_bias)
    total = g.all_reduce("all_reduce", g.sum("sum", total, part), rank.tensor_group)
    return add_bias(shared, context.weights, "proj", total, a.hidden_size) if a.mlp_bias else total
