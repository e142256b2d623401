"""The router margin against a search by brute force; the layer-wise reference against the whole transformers model."""

import itertools

import pytest
import torch

from pipeline.checkpoint.architecture import Experts
from pipeline.evaluation.reference import router_margin


def experts(**changes: object) -> Experts:
    values: dict[str, object] = {
        "num_routed": 8,
        "num_shared": 1,
        "top_k": 2,
        "intermediate_size": 64,
        "first_dense_layers": 0,
        "layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }
    return Experts(**(values | changes))  # type: ignore[arg-type]


def choose(scores: list[float], e: Experts) -> frozenset[int]:
    """DeepSeek-V2 §2.1.2 as written: the best groups by their best expert, then the best experts within."""
    candidates = set(range(len(scores)))
    if e.topk_method == "group_limited_greedy":
        size = len(scores) // e.n_group
        groups = sorted(range(e.n_group), key=lambda g: -max(scores[g * size : (g + 1) * size]))
        candidates = {i for g in groups[: e.topk_group] for i in range(g * size, (g + 1) * size)}
    return frozenset(sorted(candidates, key=lambda i: -scores[i])[: e.top_k])


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_scores_moved_by_less_than_half_the_margin_choose_the_same_experts(method: str) -> None:
    e = experts(topk_method=method)
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        scores = torch.softmax(torch.randn(8, generator=generator), -1)
        margin = float(router_margin(scores[None], e)[0])
        chosen = choose(scores.tolist(), e)
        for signs in itertools.islice(itertools.product((-1, 1), repeat=8), 0, 256, 5):
            moved = scores + 0.49 * margin * torch.tensor(signs, dtype=torch.float32)
            assert choose(moved.tolist(), e) == chosen


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_a_tie_at_the_edge_has_no_margin(method: str) -> None:
    scores = torch.tensor([[0.3, 0.01, 0.2, 0.01, 0.2, 0.01, 0.01, 0.01]])
    assert float(router_margin(scores, experts(topk_method=method))[0]) == 0.0


def test_the_margin_is_the_gap_between_the_last_chosen_and_the_first_spurned() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.25, 0.05, 0.0, 0.0, 0.0, 0.0]])
    assert float(router_margin(scores, experts())[0]) == pytest.approx(0.05)
