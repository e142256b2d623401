"""The batched sampler against a loop over one row, against transformers' processors, and against itself in company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.runtime import sampler
from pipeline.runtime.history import History
from pipeline.runtime.sampler import NO_TOKEN, choose_tokens, edit_logits, log_probs
from pipeline.runtime.sampling import Sampling
from tests.runtime.fakes import sample_slowly

WIDTH = 61


def history(sampling: Sampling, tokens: list[int], prompt: int | None = None, **place: int) -> History:
    """A History that has seen the tokens after the prompt one by one, as the batcher shows them."""
    prompt = len(tokens) if prompt is None else prompt
    seen = tokens[:prompt]
    made = History(sampling, seen, prompt_length=prompt, **{"seed": 0, **place})
    for token in tokens[prompt:]:
        seen.append(token)
        made.add(token)
    return made


def rows_of(seed: int, count: int, width: int = WIDTH, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (count, width)).astype(np.float32))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    top_p_decay=st.sampled_from([1.0, 0.8]),
    top_p_min=st.sampled_from([1e-6, 0.3]),
    top_p_reset_id=st.integers(-1, 5),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    min_tokens=st.integers(0, 6),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    embedding_bias=st.none()
    | st.integers(0, 99).map(lambda n: np.random.default_rng(n).normal(0, 2, WIDTH).astype(np.float32)),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[History]]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
        place = {"seed": draw(st.integers(0, 2**64 - 1)), "index": draw(st.integers(0, 3))}
        prompt = draw(st.integers(1, len(tokens)))
        rows.append(history(draw(samplings), tokens, prompt, end_id=draw(st.integers(-1, 5)), **place))
    logits = rows_of(draw(st.integers(0, 999)), len(rows))
    if draw(st.booleans()):
        logits = logits.round()  # many equal ones
    return logits, rows


@given(batches(), st.sampled_from([4, 256]))
@settings(max_examples=400, deadline=None)
def test_a_batch_is_its_rows_one_by_one(batch: tuple[torch.Tensor, list[History]], candidates: int) -> None:
    logits, rows = batch
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "NUCLEUS_CANDIDATES", candidates)
        chosen = choose_tokens(logits, rows)
    assert torch.equal(logits, before)
    for row, token, h in zip(logits, chosen, rows, strict=True):
        place = {"seed": h.seed, "index": h.index, "end_id": h.end_id}
        expected = sample_slowly(row.numpy(), h.sampling, h.tokens, h.prompt_length, **place)
        assert token == (NO_TOKEN if expected is None else expected)


@given(batches())
@settings(max_examples=100, deadline=None)
def test_no_row_depends_on_its_neighbours(batch: tuple[torch.Tensor, list[History]]) -> None:
    logits, rows = batch
    assert choose_tokens(logits, rows) == [choose_tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def drawn_set(logits: torch.Tensor, sampling: dict[str, Any], tokens: list[int], draws: int = 400) -> set[int]:
    """What comes out over many seeds."""
    rows = [history(Sampling(**sampling), tokens, seed=seed) for seed in range(draws)]
    return set(choose_tokens(logits.expand(draws, -1), rows))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        ({"top_k": 4}, [TopKLogitsWarper(4)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 0.6, "top_k": 6, "top_p": 0.8},
            [TemperatureLogitsWarper(0.6), TopKLogitsWarper(6), TopPLogitsWarper(0.8)],
        ),
        (
            {"repetition_penalty": 1.8, "temperature": 0.7, "top_k": 5},
            [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)],
        ),
        (
            {"top_k": 5, "bad_words": ((3,), (1, 2), (2, 1, 4))},
            [NoBadWordsLogitsProcessor([[3], [1, 2], [2, 1, 4]]), TopKLogitsWarper(5)],
        ),
    ],
)
def test_the_distribution_is_that_of_transformers(seed: int, sampling: dict[str, Any], processors: list[Any]) -> None:
    """Which tokens can come, and how often they do."""
    logits, tokens = rows_of(seed, 1, width=20, scale=1.5), [4, 2, 1]
    expected = LogitsProcessorList(processors)(torch.tensor([tokens]), logits.clone()).softmax(-1)[0]
    draws = 4000
    rows = [history(Sampling(**sampling), tokens, seed=n) for n in range(draws)]
    counts = torch.bincount(torch.tensor(choose_tokens(logits.expand(draws, -1), rows)), minlength=20).double()
    possible = expected > 0
    assert not counts[~possible].any()
    expected = expected[possible].double() * draws
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 3 * possible.sum() + 30


def test_penalties_are_openais_formula_after_the_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.125)
    edited = edit_logits(logits, [history(sampling, [0, 1, 1, 1])])
    assert edited.tolist() == [[2 / 2 - 0.25 - 0.125, -2 * 2 - 0.25 - 3 * 0.125, 1.0, 0.5]]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "top_p": 0.9},
        {"top_k": 1, "top_p": 0.9},
        {},
        {"temperature": 3.0, "top_k": 0, "top_p": 0.0},
    ],
)
def test_greedy_requests(sampling: dict[str, Any]) -> None:
    logits = rows_of(1, 5)
    rows = [history(Sampling(**sampling), [1], seed=n) for n in range(5)]
    assert choose_tokens(logits, rows) == logits.argmax(-1).tolist()


def test_the_first_of_equal_tokens_is_the_best() -> None:
    logits = torch.zeros(2, 500)
    assert choose_tokens(logits, [history(Sampling(), [1]), history(Sampling(temperature=0.0), [1])]) == [0, 0]
    assert drawn_set(logits[:1], {"top_k": 3}, [1]) == {0, 1, 2}


def test_the_two_zeros_are_equal() -> None:
    logits = torch.full((40, 600), -5.0)
    logits[:, 0], logits[:, 1:3] = -0.0, 0.0
    rows = [history(Sampling(top_k=2 if n else 5), [1], seed=n) for n in range(40)]
    assert set(choose_tokens(logits, rows)[1:]) == {0, 1}


@pytest.mark.parametrize("more", [3, 16])
def test_a_nucleus_wider_than_the_candidates_looked_at_first(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(sampler, "MORE", more)
    logits = torch.arange(0, 0.5, 0.0005)[None]  # 1000, nearly equal
    wide = rows_of(0, 1, width=3000, scale=0.5)
    for row in (logits, wide):
        expected = TopPLogitsWarper(0.5)(torch.tensor([[1]]), row.clone())[0]
        tokens = drawn_set(row, {"top_p": 0.5}, [1], draws=5000)
        assert expected[list(tokens)].isfinite().all()
        assert len(tokens) > 0.85 * expected.isfinite().sum()


def test_more_equal_tokens_than_a_nucleus_takes() -> None:
    tokens = drawn_set(torch.zeros(1, 1000), {"top_p": 0.5}, [1], draws=4000)
    assert max(tokens) == 499 and len(tokens) > 480


def test_a_nucleus_that_decays_ends_greedy_and_a_reset_opens_it() -> None:
    sampling = {"top_p": 0.95, "top_p_decay": 0.1, "top_p_reset_id": 7}
    logits = rows_of(2, 1)
    best = int(logits.argmax())

    def draw(generated: list[int]) -> set[int]:
        rows = [history(Sampling(**sampling), [1, *generated], 1, seed=n) for n in range(100)]
        return set(choose_tokens(logits.expand(100, -1), rows))

    assert len(draw([])) > 3
    assert draw([3, 4, 5]) == {best}
    assert len(draw([3, 4, 7])) > 3


def test_temperatures_near_zero_and_very_high() -> None:
    logits = rows_of(3, 1, scale=30)
    assert drawn_set(logits, {"temperature": 1e-30, "top_p": 1.0}, [1]) == {int(logits.argmax())}
    assert len(drawn_set(logits, {"temperature": 1e6, "top_p": 1.0}, [1])) > WIDTH * 0.9


def test_everything_excluded_gives_no_token() -> None:
    bias = np.full(WIDTH, -np.inf, np.float32)
    rows = [history(Sampling(embedding_bias=bias, top_p=p), [1]) for p in (0.0, 0.5, 1.0)] + [history(Sampling(), [1])]
    chosen = choose_tokens(rows_of(4, 4), rows)
    assert chosen[:3] == [NO_TOKEN] * 3 and chosen[3] >= 0


def test_the_end_waits_for_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = 50
    sampling = Sampling(min_tokens=2)
    for generated, expected in ([], 0), ([5], 0), ([5, 5], 3):
        assert choose_tokens(logits, [history(sampling, [1, *generated], 1, end_id=3)]) == [expected]


def test_log_probs_are_log_softmax() -> None:
    logits, tokens = rows_of(5, 4), torch.tensor([3, 0, 60, 7])
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(4), tokens]
    assert torch.allclose(log_probs(logits, tokens).double(), expected, atol=1e-5)


def test_sequences_of_one_seed_differ_and_repeat() -> None:
    logits = torch.zeros(1, 1000).expand(8, -1)
    rows = [history(Sampling(top_p=1.0), [1], seed=5, index=index) for index in range(8)]
    assert len(set(choose_tokens(logits, rows))) == 8
    assert choose_tokens(logits, rows) == choose_tokens(logits, rows)
