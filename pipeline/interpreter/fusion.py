"""Rewrites that make a step cheaper and keep its meaning: recognised by kinds and connections, never by names.

Each rule maps one node to nodes whose last makes the same outputs. Two ideas do most of the work: what depends only on
the step (rows of the RoPE tables, places in the pool, the mask as a bias) becomes a node of its own, which
`graph.merge_equal` then keeps once for all layers; and a product with a constant becomes a `linear`, whose weight is
laid out once for the CPU's matrix kernel. The kernels are in operations/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.interpreter.graph import drop_unused, merge_equal, rewrite
from pipeline.interpreter.rules import attention, experts, linear, pointwise, rotary

if TYPE_CHECKING:
    from pipeline.interpreter.graph import Graph, Rule
    from pipeline.interpreter.numerics import Numerics

RULES: tuple[Rule, ...] = (
    attention.split_cache_update,
    rotary.split_rotary,
    rotary.fuse_rotation,
    rotary.round_rotation,
    attention.split_attention,
    attention.merge_pages,
    attention.share_rows,
    pointwise.fuse_norm,
    pointwise.fuse_gate,
    linear.prepare_linear,
    experts.skip_experts,
)
# What rounds elsewhere than the network declares, or not at all.
FAST_RULES: tuple[Rule, ...] = (
    attention.split_cache_update,
    rotary.split_rotary,
    rotary.fuse_rotation,
    rotary.scale_rotation,
    rotary.round_rotation,
    rotary.join_rotations,
    rotary.join_rotated,
    rotary.scale_joined,
    rotary.round_joined,
    linear.prepare_packed_linear,
    linear.merge_packed_linears,
)
# On what the others made and equal nodes merged.
LAST_FAST_RULES: tuple[Rule, ...] = (
    attention.attend_in_place,
    attention.attend_packed,
    attention.attend_latent,
    rotary.write_rotated,
    rotary.write_joined,
    experts.skip_packed_experts,
    pointwise.sum_and_norm,
)


# What depends only on the step, which the rules split off.
OF_THE_STEP = frozenset(
    {"attention_bias", "cache_rows", "head_turns", "page_rows", "rotary_rows", "row_index", "row_turns"}
)


def fuse(graph: Graph, numerics: Numerics) -> Graph:
    for rule in (*FAST_RULES, *RULES) if numerics.mode == "fast" else RULES:
        graph = rewrite(graph, rule)
    graph = drop_unused(merge_equal(graph, numerics))
    for rule in LAST_FAST_RULES if numerics.mode == "fast" else ():
        graph = rewrite(graph, rule)
    return _step_first(graph) if numerics.mode == "fast" else graph


def _step_first(graph: Graph) -> Graph:
    """What depends only on the step is computed before the layers, so that it does not part their kernels in C."""
    first: set[str] = set()  # outputs
    for node in reversed(graph.nodes):
        if node.kind in OF_THE_STEP or any(spec.name in first for spec in node.outputs):
            first.update(name for name in (*node.inputs, *(spec.name for spec in node.outputs)) if name is not None)
    of_the_step = [any(spec.name in first for spec in node.outputs) for node in graph.nodes]
    ordered = sorted(zip(of_the_step, graph.nodes, strict=True), key=lambda pair: not pair[0])
    return graph.with_nodes(node for _, node in ordered)
