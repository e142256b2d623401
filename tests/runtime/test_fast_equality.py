"""With the interpreter in fast mode: in any mix, a request's tokens are exact mode's, greedy and drawn, except where
exact mode's choice is closer to another than the stated bound: the best two logits where it is greedy, the random
number and a border between two tokens where it is drawn. Every exception is counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pipeline.interpreter.numerics import FAST_MARGIN
from pipeline.runtime.handle import Handle
from pipeline.runtime.noise import draw_uniforms
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.sampling import Sampling
from tests.interpreter.trained import NAMES, quantize_trained, read_held_out
from tests.runtime.borders import find_possible
from tests.runtime.fakes import sample_slowly
from tests.runtime.test_equality import BLOCK, Served, drain, run_mix

MIXES = 8
MOST = {"greedy": 0.05, "drawn": 0.1}  # of the tokens may be exceptions
# In a routed model, a near tie of two experts moves a row's logits further than rounding does, in one row of a hundred
# (numerics.py): of such rows it takes a few to meet a random number that comes between.
MOST_FAULTS = {"deepseek-v2-tiny": 0.01, "deepseek-coder-tiny": 0.0}
SAMPLINGS = [
    *[Sampling()] * 4,
    Sampling(top_p=1.0, seed=1),
    Sampling(top_k=20, temperature=0.8, seed=2),
    Sampling(top_p=0.9, temperature=0.7, seed=3),
    Sampling(top_k=40, top_p=0.95, min_p=0.02, seed=4),
]


@dataclass(frozen=True)
class Answer:
    """One sequence of a request's."""

    request: Request
    index: int
    tokens: tuple[int, ...]


@dataclass
class Verdict:
    """Of so many tokens, how many are not exact mode's after the same history, and how many of these could not be even
    with logits as far off as is stated."""

    tokens: int = 0
    exceptions: int = 0
    faults: int = 0


@dataclass
class Both:
    """One INT4 network in both modes, and requests about text that it was not trained on."""

    name: str
    fast: Served
    exact: Served
    requests: list[Request]


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    program = quantize_trained(request.param, tmp_path_factory.mktemp("fast"), block_size=BLOCK)
    (vocabulary,) = [port.shape[-1] for port in program.outputs if port.name == "logits"]
    fast, exact = (Served(InterpreterRunner(program, mode=mode), None, vocabulary) for mode in ("fast", "exact"))
    text, rng = read_held_out(request.param, 400), random.Random(3)
    requests = []
    for n, sampling in enumerate(SAMPLINGS * 2):
        start = 37 + 20 * n
        prompt = text[: rng.choice([0, 16, 37])] + text[start : start + rng.randrange(1, 24)]
        requests.append(
            Request(
                input_ids=tuple(prompt),
                max_tokens=rng.randrange(8, 24),
                sampling=sampling,
                num_return_sequences=1 if sampling.seed != 3 else 1 + n // len(SAMPLINGS),
            )
        )
    return Both(request.param, fast, exact, requests)


def take(handles: Sequence[Handle]) -> list[Answer]:
    return [
        Answer(replace(handle.request, priority=Priority.P1), index, tuple(output.tokens))
        for handle in handles
        for index, output in enumerate(handle.result(0).outputs)
    ]


def judge(exact: Served, answers: Sequence[Answer]) -> Verdict:
    executor = exact.executor(reuse_blocks=False)
    handles = [executor.submit(_read_again(answer)) for answer in answers]
    drain(executor)
    verdict = Verdict()
    for answer, handle in zip(answers, handles, strict=True):
        logits = handle.result(0).context_logits
        assert logits is not None
        prompt, sampling = list(answer.request.input_ids), answer.request.sampling
        for step, (row, token) in enumerate(zip(logits[len(prompt) - 1 : -1], answer.tokens, strict=True)):
            history, place = [*prompt, *answer.tokens[:step]], (sampling.seed or 0, answer.index)
            chosen = sample_slowly(row.numpy(), sampling, history, len(prompt), seed=place[0], index=place[1])
            (uniform,) = draw_uniforms(*(np.array([number], np.uint64) for number in (*place, step)))
            # The margin is between two logits, which may be off to both sides.
            possible = find_possible(row.numpy(), sampling, uniform, FAST_MARGIN / 2 * float(row.std()))
            assert chosen is not None and possible[chosen]
            verdict.tokens += 1
            verdict.exceptions += token != chosen
            verdict.faults += not possible[token]
    return verdict


def _read_again(answer: Answer) -> Request:
    """What shows the logits before each of its tokens."""
    return Request(input_ids=(*answer.request.input_ids, *answer.tokens), max_tokens=1, return_context_logits=True)


@pytest.fixture(scope="module")
def mixed(both: Both) -> list[Answer]:
    """What fast mode answers, all mixes together."""
    return list(dict.fromkeys(a for seed in range(MIXES) for a in take(run_mix(both.fast, both.requests, seed))))


@pytest.mark.parametrize("kind", MOST)
def test_in_any_mix_the_tokens_are_exact_modes_but_for_near_ties(
    both: Both, mixed: list[Answer], kind: str, record_property: Callable[[str, object], None]
) -> None:
    greedy = kind == "greedy"
    answers = [answer for answer in mixed if answer.request.sampling.is_greedy is greedy]
    verdict = judge(both.exact, answers)
    record_property("verdict", str(verdict))
    print(f"{len(answers)} answers: {verdict}")
    asked = {request.input_ids for request in both.requests if request.sampling.is_greedy is greedy}
    assert len({answer.request.input_ids for answer in answers}) > 0.8 * len(asked)
    assert verdict.exceptions <= MOST[kind] * verdict.tokens
    assert verdict.faults <= (0 if greedy else MOST_FAULTS[both.name] * verdict.tokens)


def test_a_token_that_is_not_exact_modes_is_found(both: Both) -> None:
    """Exact mode's own are none; another token in the place of each answer's last is, near tie or not."""
    answers = take(run_mix(both.exact, both.requests, 0))
    verdict = judge(both.exact, answers)
    assert (verdict.exceptions, verdict.faults) == (0, 0)
    changed = [
        replace(answer, tokens=(*answer.tokens[:-1], (answer.tokens[-1] + 1) % both.exact.vocabulary))
        for answer in answers
    ]
    verdict = judge(both.exact, changed)
    assert verdict.exceptions == len(answers)
    assert verdict.faults > len(answers) / 2  # where the choice was a clear one


def test_tokens_that_another_seed_draws_are_found(both: Both) -> None:
    """Where two seeds draw different tokens, the borders tell most of them apart."""
    drawn = [replace(r, num_return_sequences=1) for r in both.requests if not r.sampling.is_greedy]
    other = [replace(r, sampling=replace(r.sampling, seed=100 + n)) for n, r in enumerate(drawn)]
    executor = both.exact.executor(reuse_blocks=False)
    handles = [executor.submit(request) for request in other]
    drain(executor)
    answers = [replace(answer, request=request) for answer, request in zip(take(handles), drawn, strict=True)]
    verdict = judge(both.exact, answers)
    print(verdict)
    assert verdict.exceptions > verdict.tokens / 3
    assert verdict.faults > verdict.exceptions / 2
