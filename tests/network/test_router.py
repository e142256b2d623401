"""Routing against a loop over tokens, on the network's own router inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.architecture import Experts
from tests import fixtures
from tests.network import models
from tests.network.serving import prompts, serve

GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
PLACE = "layers.1.mlp.router"


def _route_by_loop(x: torch.Tensor, weight: torch.Tensor, e: Experts) -> list[dict[int, float]]:
    """For each token, its experts and their weights: modeling_deepseek.py of DeepSeek-V2, as prose has it."""
    routed = []
    for scores in (x.double() @ weight.double().T).softmax(1).tolist():
        size = e.num_routed // e.n_group
        allowed = range(e.num_routed)
        if e.topk_method == "group_limited_greedy":
            best = sorted(range(e.n_group), key=lambda g: -max(scores[g * size : (g + 1) * size]))[: e.topk_group]
            allowed = [i for i in allowed if i // size in best]
        chosen = sorted(allowed, key=lambda i: -scores[i])[: e.top_k]
        total = sum(scores[i] for i in chosen)
        factor = 1 / total if e.norm_topk_prob and e.top_k > 1 else e.routed_scaling_factor
        routed.append({i: scores[i] * factor for i in chosen})
    return routed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**GREEDY},
        {"topk_group": 1, "num_experts_per_tok": 3},
        {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
        {"norm_topk_prob": True},
        {**GREEDY, "norm_topk_prob": True, "num_experts_per_tok": 1},
        {"routed_scaling_factor": 16.0, "dtype": "float16"},
    ],
    ids=str,
)
def test_experts_and_weights(options: dict[str, Any], tmp_path: Path) -> None:
    model = models.load(fixtures.deepseek_v2(tmp_path / "hf", num_hidden_layers=2, **options))
    sequences = prompts(model.architecture.vocab_size)
    taps = ["layers.1.post_layernorm", f"{PLACE}.weights", f"{PLACE}.chosen.indices"]
    weight = model.source.raw["transformer.layers.1.mlp.router.weight"].to_torch()
    experts = model.architecture.experts
    assert experts is not None
    for found in serve(model.program(), sequences=sequences, taps=taps):
        expected = _route_by_loop(found[taps[0]], weight, experts)
        for weights, indices, one in zip(found[taps[1]], found[taps[2]], expected, strict=True):
            assert set(indices.tolist()) == set(one)
            np.testing.assert_allclose(weights, [one[i] for i in indices.tolist()], rtol=1e-5)


def _route_v3_by_loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, e: Experts) -> list[dict[int, float]]:
    """modeling_deepseek.py of DeepSeek-V3, as prose has it."""
    routed = []
    for scores in (x.double() @ weight.double().T).sigmoid().tolist():
        ranked = [score + offset for score, offset in zip(scores, bias.tolist(), strict=True)]
        size = e.num_routed // e.n_group
        best = sorted(range(e.n_group), key=lambda g: -sum(sorted(ranked[g * size : (g + 1) * size])[-2:]))
        allowed = [i for i in range(e.num_routed) if i // size in best[: e.topk_group]]
        chosen = sorted(allowed, key=lambda i: -ranked[i])[: e.top_k]
        total = sum(scores[i] for i in chosen) if e.norm_topk_prob and e.top_k > 1 else 1.0
        routed.append({i: scores[i] / total * e.routed_scaling_factor for i in chosen})
    return routed


@pytest.mark.parametrize("offset", [0.0, -3.0, 3.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_topk_prob": False}, {"n_group": 8, "topk_group": 3}, {"n_group": 1, "topk_group": 1}],
    ids=str,
)
def test_sigmoid_experts_and_weights(options: dict[str, Any], offset: float, tmp_path: Path) -> None:
    """Also with biases that make every ranked score negative: a spurned group must still not be chosen."""

    def shift(tensors: fixtures.Tensors) -> None:
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        tensors[name] = 4 * tensors[name] + offset

    model = models.load(fixtures.deepseek_v3(tmp_path / "hf", num_hidden_layers=2, edit=shift, **options))
    sequences = prompts(model.architecture.vocab_size)
    taps = ["layers.1.post_layernorm", f"{PLACE}.weights", f"{PLACE}.chosen.indices"]
    weight, bias = (
        model.source.raw[f"transformer.layers.1.mlp.router.{kind}"].to_torch()
        for kind in ("weight", "e_score_correction_bias")
    )
    experts = model.architecture.experts
    assert experts is not None
    for found in serve(model.program(), sequences=sequences, taps=taps):
        expected = _route_v3_by_loop(found[taps[0]], weight, bias, experts)
        for weights, indices, one in zip(found[taps[1]], found[taps[2]], expected, strict=True):
            assert set(indices.tolist()) == set(one)
            np.testing.assert_allclose(weights, [one[i] for i in indices.tolist()], rtol=1e-5)


@pytest.mark.parametrize("moe", ["dense", "gather"])
def test_scores_stay_float32_in_a_16_bit_network(moe: str, tmp_path: Path) -> None:
    model = models.load(fixtures.deepseek_v2(tmp_path / "hf", dtype="float16", num_hidden_layers=2))
    tensors = model.program(moe=moe).tensors
    for name in (PLACE, f"{PLACE}.scores", f"{PLACE}.chosen.values", f"{PLACE}.weights"):
        assert tensors[name].dtype == "float32"


def test_lowerings_agree_on_a_normalizing_router(tmp_path: Path) -> None:
    """transformers ignores norm_topk_prob, so this is compared between the lowerings."""
    write: Callable[..., Path] = fixtures.deepseek_v2
    model = models.load(write(tmp_path / "hf", norm_topk_prob=True))
    sequences = prompts(model.architecture.vocab_size)
    dense, gather = (serve(model.program(moe=moe), sequences=sequences) for moe in ("dense", "gather"))
    for one, other in zip(dense, gather, strict=True):
        assert (one["logits"] - other["logits"]).abs().max() < 1e-5
