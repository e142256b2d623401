"""Borders by themselves: nothing that can be chosen is called impossible, and little that cannot is called possible."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.runtime.sampling import Sampling
from tests.runtime.borders import find_possible
from tests.runtime.fakes import sample_slowly

VOCABULARY = 40
KINDS = {
    "greedy": {},
    "wide": {"top_p": 1.0},
    "hot": {"top_p": 1.0, "temperature": 2.0},
    "top_k": {"top_k": 6, "temperature": 0.8},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
    "both": {"top_k": 12, "top_p": 0.9},
    "min_p": {"top_p": 1.0, "min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3},
}


def choose(logits: np.ndarray, sampling: Sampling, uniform: float, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("tests.runtime.fakes.draw_uniforms", lambda *_: np.array([uniform]))
    token = sample_slowly(logits, sampling, [0], 1)
    assert token is not None
    return token


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [0.0, 0.02, 0.3])
def test_whatever_logits_within_the_error_lead_to_is_possible(
    kind: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logit off by the whole error, which moves borders and candidates furthest."""
    sampling, rng = Sampling(**KINDS[kind]), np.random.default_rng(5)
    others = 0
    for _ in range(400):
        logits, uniform = rng.normal(0, 2, VOCABULARY).astype(np.float32), rng.random()
        possible = find_possible(logits, sampling, uniform, error)
        chosen = choose(logits, sampling, uniform, monkeypatch)
        off = logits + (error * rng.choice([-1, 1], VOCABULARY)).astype(np.float32)
        token = choose(off, sampling, uniform, monkeypatch)
        assert possible[chosen] and possible[token]
        others += token != chosen
        if error == 0:
            assert possible.sum() == 1
    assert (others > 0) is (error > 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "greedy"])
def test_what_another_random_number_draws_is_mostly_impossible(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, rng = Sampling(**KINDS[kind]), np.random.default_rng(6)
    found = others = 0
    for _ in range(400):
        logits, (uniform, other) = rng.normal(0, 2, VOCABULARY).astype(np.float32), rng.random(2)
        token = choose(logits, sampling, other, monkeypatch)
        if token != choose(logits, sampling, uniform, monkeypatch):
            others += 1
            found += not find_possible(logits, sampling, uniform, 0.05)[token]
    assert found > 0.7 * others > 0
