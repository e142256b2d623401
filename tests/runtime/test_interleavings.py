"""Any request in any mix of others is answered as it is alone, and no block leaks: hundreds of random histories."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.errors import TrtseekError
from pipeline.runtime.errors import NonFiniteError
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.handle import Handle
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import FinishReason, Priority, Request
from pipeline.runtime.sampling import Sampling
from tests.runtime.fakes import POISON, VOCABULARY, FakeRunner, answer_slowly, log_probs_slowly

MIXES, MORE_MIXES = 80, 220
MAX_LENGTH = 60


def make_limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 4, 8])
    batch = rng.choice([2, 3, 5, 8])
    return Limits(
        # From barely one sequence of the longest kind to plenty.
        num_blocks=2 + -(-MAX_LENGTH // block_size) * rng.choice([1, 1, 2, 6]) + rng.randrange(4),
        block_size=block_size,
        max_seq_len=MAX_LENGTH,
        max_batch_size=batch,
        max_num_tokens=rng.choice([1, 3, 8, 200]),
        max_chunk=rng.choice([None, 1, 5]),
        context_batch=rng.choice([None, 1, 2]),
        max_padded_rows=rng.choice([None, 4, 20]),
        mixed=rng.choice([True, False]),
        generation=rng.choice([(), ((batch, 20), (1, MAX_LENGTH)), ((batch, MAX_LENGTH),)]),
    )


def make_request(rng: random.Random, beginnings: list[list[int]], clean: bool) -> Request:
    alphabet = rng.choice([2, POISON])  # with few tokens, equal blocks come at different places
    prompt = rng.choice(beginnings) + [rng.randrange(alphabet) for _ in range(rng.randrange(1, 12))]
    if not clean and rng.random() < 0.1:
        prompt[rng.randrange(len(prompt))] = POISON
    bias = np.linspace(-1, 1, VOCABULARY, dtype=np.float32) if rng.random() < 0.2 else None
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 3, 10]),
        top_p=rng.choice([0.0, 0.6, 1.0]),
        min_p=rng.choice([0.0, 0.1]),
        top_p_decay=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        presence_penalty=rng.choice([0.0, 0.3]),
        min_tokens=rng.choice([0, 4]),
        seed=rng.randrange(2**64),
        # The poison is never drawn: that a request fails is decided by its prompt.
        bad_words=((POISON,), *(((1,), (2, 3)) if rng.random() < 0.3 else ())),
        embedding_bias=bias,
    )
    return Request(
        input_ids=tuple(prompt),
        max_tokens=rng.randrange(1, min(20, MAX_LENGTH - len(prompt))),
        end_id=rng.choice([-1, 5]),
        sampling=sampling,
        stop_words=((4, 6), (7,), (8, 9, 1)) if rng.random() < 0.3 else (),
        num_return_sequences=rng.choice([1, 1, 1, 2]),
        return_log_probs=rng.random() < 0.2,
        return_context_log_probs=rng.random() < 0.1,
        streaming=rng.random() < 0.5,
        priority=Priority(rng.randrange(3)),
    )


def check_answer(handle: Handle) -> None:
    request = handle.request
    if POISON in request.input_ids:
        if isinstance(handle.error, NonFiniteError):
            return
        outputs = handle.result(0).outputs  # cancelled before it came so far
        assert {(output.finish_reason, len(output.tokens)) for output in outputs} == {(FinishReason.CANCELLED, 0)}
        return
    result = handle.result(0)
    for index, output in enumerate(result.outputs):
        tokens, reason = answer_slowly(request, index)
        if output.finish_reason in (FinishReason.CANCELLED, FinishReason.TIMED_OUT):
            assert output.tokens == tokens[: len(output.tokens)]
        else:
            assert (output.tokens, output.finish_reason) == (tokens, reason)
        if request.return_log_probs:
            expected = log_probs_slowly([*request.input_ids, *output.tokens], len(request.input_ids))
            assert output.log_probs == pytest.approx(expected, abs=1e-4)
    if request.return_context_log_probs and result.timing.first_token is not None:
        assert result.context_log_probs == pytest.approx(log_probs_slowly(request.input_ids, 1), abs=1e-4)


def drive(executor: Executor, rng: random.Random, requests: list[Request]) -> Iterator[Handle]:
    """Requests that arrive, and are sometimes cancelled, between random steps."""
    handles: list[Handle] = []
    waiting = list(requests)
    idle = 0
    while waiting or not all(handle.done for handle in handles):
        if waiting and (rng.random() < 0.5 or idle):
            try:
                handles.append(executor.submit(waiting.pop()))
            except TrtseekError as error:  # too large for this pool
                assert "cache blocks" in str(error) or "at most" in str(error)
        if handles and rng.random() < 0.03:
            rng.choice(handles).cancel()
        idle = 0 if executor.step() else idle + 1
        executor.check()
        assert idle < 3 or waiting, "nothing runs, and nothing is done"
    yield from handles


@pytest.mark.parametrize(
    "seed", [*range(MIXES), *(pytest.param(MIXES + i, marks=pytest.mark.thorough) for i in range(MORE_MIXES))]
)
def test_a_mix(seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(rng)
    clean = rng.random() < 0.5
    beginnings = [
        [],
        [rng.randrange(POISON) for _ in range(16)],
        [rng.randrange(2) for _ in range(9)],
        [0] * 12,
        [1] * 12,
    ]
    settings = ExecutorSettings(
        policy=rng.choice(list(Policy)),
        preempt=rng.random() < 0.7,
        ageing=rng.choice([None, 0.05, 5.0]),
        reuse_blocks=rng.random() < 0.8,
    )
    ticks = iter(range(10**6))
    runner = FakeRunner(limits.block_size)
    executor = Executor(runner, limits, vocab_size=VOCABULARY, settings=settings, clock=lambda: next(ticks) / 100)
    requests = [make_request(rng, beginnings, clean) for _ in range(rng.randrange(2, 14))]
    for handle in drive(executor, rng, requests):
        check_answer(handle)
    executor.step()  # zeroes what the last one left
    assert executor.batcher.pool.used == 0 and not executor.batcher.scheduler.running
    context = limits.context_sequences
    for tokens, batch, longest in runner.log:
        assert tokens <= limits.max_num_tokens or longest == 1
        assert batch <= (limits.max_batch_size if longest == 1 else context)
        assert longest == 1 or longest <= limits.chunk_for(batch)
