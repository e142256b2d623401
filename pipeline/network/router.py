"""Which experts a token goes to, and with what weight, in float32 throughout.

DeepSeek-V2 (arXiv 2405.04434 §2.2): scores are a softmax, a group is as good as its best expert. DeepSeek-V3 (arXiv
2412.19437 §2.1.2): scores are sigmoids; experts are chosen by score plus a bias that balances their load, groups by the
sum of their best two, and the weights are the scores without the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import checkpoint_name, linear_float32

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Experts
    from pipeline.network.weights import Weights

# DeepSeek's own code keeps the normalizing division finite with this.
_SMALLEST_SUM = 1e-20
# Added to the scores of spurned groups where the bias may make others negative: far below any score, and finite.
_SPURNED = -1e30


def route(g: Graph, weights: Weights, experts: Experts, x: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """x [T, H] → float32 weights and int32 experts, both [T, k]."""
    logits = linear_float32(g, weights, "router", x, experts.num_routed, hidden_size)
    at = g.at("router")
    scores = SCORES[experts.scoring_func](at, logits)
    ranked = scores if experts.topk_method != "noaux_tc" else _correct(at, g, weights, experts, scores)
    if experts.topk_method in GROUP_SCORES and experts.topk_group < experts.n_group:
        ranked = _keep_best_groups(at, experts, ranked)
    chosen, indices = at.topk("chosen", ranked, experts.top_k, 1)
    if experts.topk_method == "noaux_tc":
        chosen = at.gather_elements("chosen_scores", scores, indices, 1)
    normalized = experts.norm_topk_prob and experts.top_k > 1
    if normalized:
        total = at.reduce("total", chosen, "SUM", 1, keep=True)
        total = at.sum("total_not_zero", total, at.number("smallest_sum", [[_SMALLEST_SUM]], "float32"))
        if experts.scoring_func == "softmax":
            # DeepSeek-V2's modeling_deepseek.py normalizes instead of scaling. (transformers 5.24 ignores the flag,
            # which no published V2 checkpoint sets.)
            return at.elementwise("weights", chosen, total, "DIV"), indices
        chosen = at.elementwise("shares", chosen, total, "DIV")
    factor = at.number("scaling_factor", [[experts.routed_scaling_factor]], "float32")
    return at.product("weights", chosen, factor), indices


def _correct(at: Graph, g: Graph, weights: Weights, experts: Experts, scores: Tensor) -> Tensor:
    name = checkpoint_name(g, "router.e_score_correction_bias")
    raw = weights.read(name, (experts.num_routed,), dtypes=tuple(MODEL_DTYPES.values()))
    bias = at.constant("e_score_correction_bias", raw, (1, experts.num_routed))
    return at.sum("corrected", scores, at.cast("e_score_correction_bias_float32", bias, "float32"))


def _keep_best_groups(g: Graph, experts: Experts, scores: Tensor) -> Tensor:
    """Scores [T, E] with those of all but the best `topk_group` groups below all others. TensorRT has no scatter that
    builds go through, so the mask is a sum of one-hot rows."""
    groups, size = experts.n_group, experts.num_routed // experts.n_group
    grouped = g.reshape("grouped", scores, (-1, groups, size))
    _, best = g.topk("groups", GROUP_SCORES[experts.topk_method](g, grouped), experts.topk_group, 1)
    mask = g.reduce("group_mask", g.one_hot("group_one_hot", best, groups), "SUM", 1, keep=False)
    if experts.scoring_func == "softmax":  # positive scores: 0 is below them all
        kept = g.product("kept", grouped, g.reshape("group_mask_column", mask, (-1, groups, 1)))
    else:
        spurned = g.elementwise("group_spurned", g.number("one", [[1]], "float32"), mask, "SUB")
        penalty = g.product("group_penalty", spurned, g.number("spurned", [[_SPURNED]], "float32"))
        kept = g.sum("kept", grouped, g.reshape("group_penalty_column", penalty, (-1, groups, 1)))
    return g.reshape("kept_scores", kept, (-1, experts.num_routed))


def _best(g: Graph, grouped: Tensor) -> Tensor:
    return g.reduce("group_scores", grouped, "MAX", 2, keep=False)


def _best_two(g: Graph, grouped: Tensor) -> Tensor:
    two, _ = g.topk("group_best_two", grouped, 2, 2)
    return g.reduce("group_scores", two, "SUM", 2, keep=False)


# scoring_func -> scores [T, E] of logits [T, E]
SCORES: dict[str, Callable[[Graph, Tensor], Tensor]] = {
    "softmax": lambda g, logits: g.softmax("scores", logits, 1),
    "sigmoid": lambda g, logits: g.sigmoid("scores", logits),
}
# topk_method -> scores of groups [T, G], of experts' scores [T, G, E/G]; greedy knows no groups
GROUP_SCORES: dict[str, Callable[[Graph, Tensor], Tensor]] = {
    "group_limited_greedy": _best,
    "noaux_tc": _best_two,
}
