"""Routed experts, as config.json describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.checkpoint.config_values import ConfigValues

MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A routed MLP (DeepSeekMoE): which layers have it, its sizes, and how tokens choose experts."""

    num_routed: int
    num_shared: int
    top_k: int
    intermediate_size: int
    first_dense_layers: int
    layer_freq: int
    n_group: int
    topk_group: int
    topk_method: str  # greedy, group_limited_greedy, noaux_tc
    scoring_func: str  # softmax, sigmoid
    norm_topk_prob: bool
    routed_scaling_factor: float


def parse_experts(c: ConfigValues, layers: int, methods: tuple[str, ...], functions: tuple[str, ...]) -> Experts | None:
    """Of a model of so many decoder layers, whose class can route by `methods` and score by `functions`, the first of
    each unless it is said. None where all layers are dense. Raises CheckpointError."""
    first = c.integer("first_k_dense_replace", 0, minimum=0)
    # Null means dense layers only (DeepSeek's own code); where the key is absent, implementations' defaults differ.
    if not c.has("n_routed_experts") and ("n_routed_experts" in c.values or first >= layers):
        return None
    experts = Experts(
        num_routed=c.integer("n_routed_experts", maximum=MAX_EXPERTS),
        num_shared=c.integer("n_shared_experts", maximum=MAX_EXPERTS),
        top_k=c.integer("num_experts_per_tok", maximum=MAX_EXPERTS),
        intermediate_size=c.integer("moe_intermediate_size"),
        first_dense_layers=first,
        layer_freq=c.integer("moe_layer_freq", 1),
        n_group=c.integer("n_group", 1),
        topk_group=c.integer("topk_group", 1),
        topk_method=c.choice("topk_method", methods[0], methods),
        scoring_func=c.choice("scoring_func", functions[0], functions),
        norm_topk_prob=c.flag("norm_topk_prob", False),
        routed_scaling_factor=c.number("routed_scaling_factor", 1.0, minimum=0.0),
    )
    if experts.num_routed % experts.n_group:
        raise c.fail("n_group", f"{experts.n_group} does not divide n_routed_experts {experts.num_routed}")
    if experts.topk_group > experts.n_group:
        raise c.fail("topk_group", f"{experts.topk_group} exceeds n_group {experts.n_group}")
    grouped = experts.topk_method != "greedy"
    if experts.topk_method == "noaux_tc" and experts.num_routed // experts.n_group < 2:
        raise c.fail("n_group", f"{experts.n_group} leaves one expert to a group; groups are judged by their best two")
    reachable = experts.num_routed // experts.n_group * experts.topk_group if grouped else experts.num_routed
    if experts.top_k > reachable:
        raise c.fail("num_experts_per_tok", f"{experts.top_k} exceeds the {reachable} experts routing can reach")
    return experts
