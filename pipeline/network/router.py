"""Which experts a token goes to, and with what weight (DeepSeek-V2, arXiv 2405.04434 §2.2), in float32 throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import linear_float32

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Experts
    from pipeline.network.weights import Weights

# DeepSeek's own code keeps the normalizing division finite with this.
_SMALLEST_SUM = 1e-20


def route(g: Graph, weights: Weights, experts: Experts, x: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """x [T, H] → float32 weights and int32 experts, both [T, k]."""
    logits = linear_float32(g, weights, "router", x, experts.num_routed, hidden_size)
    at = g.at("router")
    scores = at.softmax("scores", logits, 1)
    if experts.topk_method == "group_limited_greedy":
        scores = _keep_best_groups(at, experts, scores)
    chosen, indices = at.topk("chosen", scores, experts.top_k, 1)
    if experts.norm_topk_prob and experts.top_k > 1:
        # DeepSeek-V2's modeling_deepseek.py normalizes instead of scaling. (transformers 5.24 ignores the flag, which
        # no published V2 checkpoint sets.)
        total = at.reduce("total", chosen, "SUM", 1, keep=True)
        total = at.sum("total_not_zero", total, at.number("smallest_sum", [[_SMALLEST_SUM]], "float32"))
        return at.elementwise("weights", chosen, total, "DIV"), indices
    factor = at.number("scaling_factor", [[experts.routed_scaling_factor]], "float32")
    return at.product("weights", chosen, factor), indices


def _keep_best_groups(g: Graph, experts: Experts, scores: Tensor) -> Tensor:
    """Scores [T, E] with those of all but the best `topk_group` groups set to 0; a group is as good as its best expert.
    TensorRT has no scatter that builds goes through, so the mask is a sum of one-hot rows."""
    groups, size = experts.n_group, experts.num_routed // experts.n_group
    grouped = g.reshape("grouped", scores, (-1, groups, size))
    _, best = g.topk("groups", g.reduce("group_scores", grouped, "MAX", 2, keep=False), experts.topk_group, 1)
    mask = g.reduce("group_mask", g.one_hot("group_one_hot", best, groups), "SUM", 1, keep=False)
    kept = g.product("kept", grouped, g.reshape("group_mask_column", mask, (-1, groups, 1)))
    return g.reshape("kept_scores", kept, (-1, experts.num_routed))
