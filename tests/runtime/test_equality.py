"""With the interpreter in exact mode: whatever runs beside a request, and however its prompt is cut, shared, paused and
computed again, it gets the tokens that it gets alone; greedily, those of transformers' own generation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.runtime.errors import NonFiniteError
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.handle import Handle
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import FinishReason, Priority, Request
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.sampling import Sampling
from tests import fixtures
from tests.network import models

BLOCK, VOCABULARY, POISON = 8, 512, 511
MIXES = 20
BEGINNING = random.Random(1).choices(range(2, POISON), k=37)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    """Whatever sees this token overflows."""
    tensors["model.embed_tokens.weight"][POISON] = torch.inf


@dataclass
class Served:
    runner: InterpreterRunner
    reference: Any
    vocabulary: int = VOCABULARY
    answers: dict[Request, list[list[int]]] = field(default_factory=dict)

    def executor(self, limits: Limits | None = None, **settings: Any) -> Executor:
        limits = limits or make_limits()
        return Executor(self.runner, limits, vocab_size=self.vocabulary, settings=ExecutorSettings(**settings))

    def answer_alone(self, request: Request) -> list[list[int]]:
        """Nobody else, nothing shared, the prompt in one piece; checked against transformers where it is greedy."""
        if request not in self.answers:
            request = replace(request, priority=Priority.P1)
            executor = self.executor(reuse_blocks=False)
            handle = executor.submit(request)
            drain(executor)
            self.answers[request] = [output.tokens for output in handle.result(0).outputs]
            if request.sampling.is_greedy:
                assert self.answers[request][0] == self.generate(request)
        return self.answers[request]

    def generate(self, request: Request) -> list[int]:
        prompt = torch.tensor([request.input_ids])
        made = self.reference.generate(
            prompt, max_new_tokens=request.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens = made[0, prompt.shape[1] :].tolist()
        return tokens[: tokens.index(request.end_id)] if request.end_id in tokens else tokens


def make_limits(**changes: Any) -> Limits:
    values = {"num_blocks": 200, "block_size": BLOCK, "max_seq_len": 256, "max_batch_size": 8, "max_num_tokens": 512}
    return Limits(**{**values, **changes})


def drain(executor: Executor) -> None:
    while executor.step() or executor.batcher.answers.live:
        executor.check()


@pytest.fixture(scope="module", params=[fixtures.llama, fixtures.deepseek_v2], ids=["llama", "deepseek_v2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    write: Callable[..., Path] = request.param
    model = models.load(write(tmp_path_factory.mktemp("equality") / "m", num_hidden_layers=2, edit=poison))
    return Served(InterpreterRunner(model.program(), mode="exact"), model.reference())


def make_requests() -> list[Request]:
    rng = random.Random(2)
    greedy, never = Sampling(), ((POISON,),)
    seeded = [Sampling(top_k=20, top_p=0.9, temperature=0.8, seed=seed, bad_words=never) for seed in range(3)]
    wide = Sampling(top_p=1.0, repetition_penalty=1.2, frequency_penalty=0.2, seed=9, bad_words=never)
    requests = []
    for n, (sampling, count) in enumerate(
        [(greedy, 1), (greedy, 1), (greedy, 1), (seeded[0], 1), (seeded[1], 1), (seeded[2], 3), (wide, 1), (wide, 2)]
    ):
        start = BEGINNING[: rng.choice([0, 16, 37])]
        prompt = [*start, *rng.choices(range(2, POISON), k=rng.randrange(1, 24))]
        requests.append(
            Request(
                input_ids=tuple(prompt),
                max_tokens=rng.randrange(6, 20),
                end_id=1,
                sampling=sampling,
                num_return_sequences=count,
                priority=Priority(n % 3),
            )
        )
    return requests


REQUESTS = make_requests()


def check(served: Served, handle: Handle) -> None:
    expected = served.answer_alone(replace(handle.request, priority=Priority.P1))
    for output, tokens in zip(handle.result(0).outputs, expected, strict=True):
        assert output.tokens == tokens
        assert output.finish_reason in (FinishReason.LENGTH, FinishReason.END_ID)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_chunk": 5},
        {"max_num_tokens": 8},
        {"num_blocks": 16},
        {"max_padded_rows": 32, "context_batch": 2, "generation": ((8, 48), (2, 256))},
    ],
    ids=lambda limits: ",".join(limits) or "plenty",
)
@pytest.mark.parametrize("policy", Policy)
def test_together_as_alone(served: Served, policy: Policy, limits: dict[str, Any]) -> None:
    executor = served.executor(make_limits(**limits), policy=policy)
    handles = [executor.submit(request) for request in REQUESTS]
    drain(executor)
    for handle in handles:
        check(served, handle)
    if limits.get("num_blocks") and policy is Policy.MAX_UTILIZATION:
        assert sum(handle.result(0).times_paused for handle in handles) > 0
    assert executor.batcher.pool.used == 0


def run_mix(served: Served, requests: list[Request], seed: int) -> list[Handle]:
    """Arrivals at random steps, tight pools, preemption by class, beginnings that others left in the cache."""
    rng = random.Random(seed)
    limits = make_limits(
        num_blocks=rng.choice([14, 20, 60]),
        max_batch_size=rng.choice([3, 4, 8]),
        max_num_tokens=rng.choice([6, 40, 512]),
        max_chunk=rng.choice([None, 4, 16]),
    )
    executor = served.executor(limits, policy=rng.choice(list(Policy)), ageing=None)
    waiting = rng.sample(requests, 6)
    handles: list[Handle] = []
    while waiting or executor.batcher.answers.live:
        if waiting and rng.random() < 0.4:
            request = waiting.pop()
            if request.num_return_sequences == 1 or limits.num_blocks == 60:
                handles.append(executor.submit(replace(request, priority=Priority(rng.randrange(3)))))
        executor.step()
        executor.check()
    assert executor.batcher.pool.used == 0
    return handles


@pytest.mark.parametrize("seed", range(MIXES))
def test_in_any_mix(served: Served, seed: int) -> None:
    for handle in run_mix(served, REQUESTS, seed):
        check(served, handle)


@pytest.mark.parametrize("policy", Policy)
def test_the_logits_are_the_same_to_the_last_bit(served: Served, policy: Policy) -> None:
    """So that no near tie can make a difference either: chunks, company, a shared beginning, pauses."""
    watched = [replace(request, return_generation_logits=True, priority=Priority.P1) for request in REQUESTS]

    def logits(handle: Handle) -> list[torch.Tensor]:
        return [row for output in handle.result(0).outputs for row in output.generation_logits]

    alone = []
    for request in watched:
        executor = served.executor(reuse_blocks=False)
        alone.append(executor.submit(request))
        drain(executor)
    executor = served.executor(make_limits(num_blocks=24, max_num_tokens=24, max_chunk=11), policy=policy)
    together = [executor.submit(request) for request in watched]
    drain(executor)
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, logits(one), logits(other)))
        assert len(logits(one)) == len(logits(other)) == sum(len(output.tokens) for output in one.result(0).outputs)


def test_a_beginning_in_the_cache_changes_no_token(served: Served) -> None:
    executor = served.executor()
    for _ in range(2):
        handles = [executor.submit(request) for request in REQUESTS]
        drain(executor)
        for handle in handles:
            check(served, handle)
    reused = {handle.request: handle.result(0).reused_blocks for handle in handles}
    assert all(count == (len(request.input_ids) - 1) // BLOCK for request, count in reused.items())


def test_a_request_that_is_not_finite_fails_alone(served: Served) -> None:
    """Also where others began like it, and in the blocks that it leaves behind."""
    executor = served.executor(make_limits(num_blocks=40))
    bad = Request(input_ids=(*BEGINNING, POISON, 5, 6), max_tokens=10)
    others = [executor.submit(request) for request in REQUESTS[:3]]
    executor.step()
    failing = [executor.submit(bad), executor.submit(replace(bad, input_ids=(*bad.input_ids, 7)))]
    others += [executor.submit(request) for request in REQUESTS[3:]]
    drain(executor)
    for handle in failing:
        with pytest.raises(NonFiniteError, match="not finite"):
            handle.result(0)
    for handle in others:
        check(served, handle)
    assert all(pool.isfinite().all() for pool in served.runner.pools.values())


def test_log_probs_and_logits_are_those_of_transformers(served: Served) -> None:
    wanted = {"return_log_probs": True, "return_context_log_probs": True}
    request = replace(
        REQUESTS[1],
        return_context_logits=True,
        return_generation_logits=True,
        end_id=-1,
        priority=Priority.P1,
        **wanted,
    )
    executor = served.executor(make_limits(max_chunk=7))
    result = executor.submit(request)
    executor.submit(REQUESTS[0])
    drain(executor)
    answer, prompt = result.result(0), len(request.input_ids)
    (output,) = answer.outputs
    tokens = torch.tensor([[*request.input_ids, *output.tokens]])
    with torch.inference_mode():
        logits = served.reference(tokens).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
    assert answer.context_logits is not None and answer.context_log_probs is not None
    torch.testing.assert_close(answer.context_logits, logits[:prompt], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(torch.stack(output.generation_logits), logits[prompt - 1 : -1], atol=1e-3, rtol=1e-4)
    got = torch.tensor([*answer.context_log_probs, *output.log_probs])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert output.cum_log_prob == pytest.approx(sum(output.log_probs))
