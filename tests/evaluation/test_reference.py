"""The router margin against a search by brute force; the layer-wise reference against the whole transformers model."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.architecture import Experts, parse_architecture
from pipeline.checkpoint.reference import build_hf_layer
from pipeline.evaluation.reference import _margin_recorder, router_margin
from tests import fixtures


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
    """DeepSeek-V2 §2.1.2 as written: the best groups by their best expert, then the best experts within. V3 adds up a
    group's best two."""
    candidates = set(range(len(scores)))
    if e.topk_method != "greedy":
        size, count = len(scores) // e.n_group, 2 if e.topk_method == "noaux_tc" else 1
        groups = sorted(range(e.n_group), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size])[-count:]))
        candidates = {i for g in groups[: e.topk_group] for i in range(g * size, (g + 1) * size)}
    return frozenset(sorted(candidates, key=lambda i: -scores[i])[: e.top_k])


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_scores_moved_by_less_than_half_the_margin_choose_the_same_experts(method: str) -> None:
    e = experts(topk_method=method)
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        logits = torch.randn(8, generator=generator)
        # V3 ranks sigmoids with a bias, which may be negative altogether.
        scores = torch.sigmoid(logits) - 0.7 if method == "noaux_tc" else torch.softmax(logits, -1)
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


@pytest.mark.parametrize("offset", [0.0, -2.0, 2.0])
def test_the_recorder_sees_what_the_router_ranks(offset: float, tmp_path: Path) -> None:
    """A V3 router's own choice, and that of the scores whose margin is taken."""
    path = fixtures.deepseek_v3(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    state = {
        name.removeprefix("model.layers.1."): tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("model.layers.1.")
    }
    state["mlp.gate.e_score_correction_bias"] += offset + torch.linspace(0, 0.5, 16)
    router = build_hf_layer(config, 1, state, torch.float32).get_submodule("mlp.gate")
    e = parse_architecture(config).experts
    assert e is not None
    margins: list[torch.Tensor] = []
    router.register_forward_hook(_margin_recorder(e, margins))
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    _, _, chosen = router(x)
    bias = state["mlp.gate.e_score_correction_bias"]
    ranked = list(torch.sigmoid(x @ state["mlp.gate.weight"].float().T) + bias)
    assert [choose(scores.tolist(), e) for scores in ranked] == [frozenset(row.tolist()) for row in chosen]
    assert torch.allclose(margins[0], router_margin(torch.stack(ranked), e))
    assert (margins[0] > 0).all()
