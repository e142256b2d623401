"""The executor's doors: updates, results, errors, threads, deadlines, queues, drain. Answers themselves are compared in
test_interleavings.py and test_equality.py."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.runtime.errors import (
    NonFiniteError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    RunnerError,
    ServingError,
    ShutdownError,
)
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.handle import Handle, Update
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import FinishReason, Priority, Request
from pipeline.runtime.sampling import Sampling
from tests.runtime.fakes import POISON, VOCABULARY, FakeRunner, answer_slowly

CLEAN = Sampling(bad_words=((POISON,),))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Any = time.monotonic, limits: dict[str, Any] | None = None, **settings: Any) -> Executor:
    defaults = {"num_blocks": 41, "block_size": 4, "max_seq_len": 160, "max_batch_size": 4, "max_num_tokens": 32}
    bounds = Limits(**{**defaults, **(limits or {})})
    return Executor(
        FakeRunner(bounds.block_size), bounds, vocab_size=VOCABULARY, settings=ExecutorSettings(**settings), clock=clock
    )


def ask(*prompt: int, **values: Any) -> Request:
    return Request(**{"input_ids": prompt or (1, 2, 3), "max_tokens": 6, "sampling": CLEAN, **values})


def drain(executor: Executor) -> None:
    while executor.step() or executor.batcher.answers.live:
        executor.check()


def runner_of(executor: Executor) -> FakeRunner:
    runner = executor.batcher.runner
    assert isinstance(runner, FakeRunner)
    return runner


# Updates and results


def test_a_streaming_request_gets_each_token_as_it_comes() -> None:
    executor, updates = make(), list[Update]()
    request = ask(streaming=True, return_log_probs=True)
    handle = executor.submit(request, updates.append)
    for count in range(1, 6):
        executor.step()
        assert len(updates) == count and not handle.done
    drain(executor)
    tokens, reason = answer_slowly(request)
    assert [update.tokens for update in updates] == [[token] for token in tokens]
    assert [len(update.log_probs or ()) for update in updates] == [1] * 6
    assert [update.is_final for update in updates] == [False] * 5 + [True]
    assert updates[-1].finish_reason is reason is FinishReason.LENGTH
    assert handle.result(0).outputs[0].tokens == tokens
    assert updates[0].output_ids == tokens[:1]  # a stream never repeats the prompt


@pytest.mark.parametrize("exclude", [True, False])
def test_others_get_a_sequence_whole(exclude: bool) -> None:
    executor = make()
    request = ask(exclude_input_in_output=exclude)
    handle = executor.submit(request)
    drain(executor)
    (update,) = handle
    tokens, _ = answer_slowly(request)
    assert update.tokens == tokens and update.is_final
    assert update.output_ids == (tokens if exclude else [1, 2, 3, *tokens])


def test_several_sequences_end_one_by_one() -> None:
    executor = make()
    request = ask(num_return_sequences=3, end_id=5, sampling=replace(CLEAN, top_p=1.0, seed=4), max_tokens=30)
    updates = list(_drained(executor, executor.submit(request)))
    assert sorted(update.sequence_index for update in updates) == [0, 1, 2]
    assert [update.is_final for update in updates] == [False, False, True]
    for update in updates:
        assert (update.tokens, update.finish_reason) == answer_slowly(request, update.sequence_index)
    assert len({tuple(update.tokens) for update in updates}) == 3


def _drained(executor: Executor, handle: Any) -> Any:
    drain(executor)
    return handle


def test_the_end_id_is_not_part_of_the_answer_and_stop_words_are() -> None:
    tokens, _ = answer_slowly(ask())
    executor = make()
    ended = executor.submit(ask(end_id=tokens[2], streaming=True))
    word = (3, *tokens[:1])  # begins in the prompt
    stopped = executor.submit(ask(stop_words=((30, 31), word)))
    drain(executor)
    assert ended.result(0).outputs[0].tokens == tokens[: tokens.index(tokens[2])]
    assert ended.result(0).outputs[0].finish_reason is FinishReason.END_ID
    assert stopped.result(0).outputs[0].tokens == tokens[:1]
    assert stopped.result(0).outputs[0].finish_reason is FinishReason.STOP_WORDS


def test_a_seed_is_chosen_told_and_repeats() -> None:
    executor = make()
    sampling = replace(CLEAN, top_p=1.0)
    first, second = (executor.submit(ask(sampling=sampling, max_tokens=20)) for _ in range(2))
    drain(executor)
    one, two = first.result(0), second.result(0)
    assert one.seed != two.seed and one.outputs[0].tokens != two.outputs[0].tokens
    again = executor.submit(ask(sampling=replace(sampling, seed=one.seed), max_tokens=20))
    drain(executor)
    assert again.result(0).outputs[0].tokens == one.outputs[0].tokens


def test_a_result_tells_times_and_blocks() -> None:
    clock = Clock()
    executor = make(clock)
    observed: dict[tuple[str, Priority], list[float]] = defaultdict(list)
    executor.statistics.on_observation = lambda name, priority, seconds: observed[name, priority].append(seconds)
    prompt = range(9)
    handle = executor.submit(ask(*prompt, max_tokens=2))
    clock.now = 103.0
    executor.step()
    clock.now = 104.0
    executor.step()
    again = executor.submit(ask(*prompt, max_tokens=2))
    drain(executor)
    timing = handle.result(0).timing
    assert (timing.arrival, timing.first_scheduled, timing.first_token, timing.last_token) == (100, 103, 103, 104)
    assert (handle.result(0).reused_blocks, handle.result(0).new_blocks) == (0, 3)
    assert (again.result(0).reused_blocks, again.result(0).new_blocks, again.result(0).total_blocks) == (2, 1, 3)
    read = executor.statistics.read
    assert read()["prefix_hit_tokens"] == 8 and read()["prompt_tokens"] == 18 and read()["generated_tokens"] == 4
    assert observed["time_to_first_token", Priority.P1] == [3.0, 0.0]
    assert sum(observed["queue_time", Priority.P1]) == 3.0
    assert sum(observed["time_per_token", Priority.P1]) == 1.0


# Errors


def test_what_cannot_run_is_refused_at_the_door() -> None:
    executor = make(limits={"num_blocks": 6})
    for request, field in (
        (ask(VOCABULARY), "input_ids"),
        (ask(max_tokens=200), "max_tokens"),
        (ask(max_tokens=60), "max_tokens"),
        (ask(num_return_sequences=9), "num_return_sequences"),
    ):
        with pytest.raises(RequestError) as caught:
            executor.submit(request)
        assert caught.value.field == field
    assert not executor.step() and not executor.batcher.answers.live


def test_excluding_every_token_fails_the_request_alone() -> None:
    executor = make()
    bias = np.full(VOCABULARY, -np.inf, np.float32)
    handle, other = executor.submit(ask(sampling=Sampling(embedding_bias=bias))), executor.submit(ask())
    drain(executor)
    with pytest.raises(RequestError, match="no token to choose"):
        handle.result(0)
    assert other.result(0).outputs[0].tokens == answer_slowly(ask())[0]


def test_blocks_of_what_was_not_finite_are_zeroed_before_anyone_gets_them() -> None:
    executor = make(limits={"num_blocks": 9})
    bad = executor.submit(ask(*range(10), POISON, streaming=True))
    with pytest.raises(NonFiniteError):
        list(_drained(executor, bad))
    executor.step()
    assert sorted(runner_of(executor).zeroed) == [1, 2, 3]
    good = executor.submit(ask(*range(11), max_tokens=20))
    drain(executor)
    assert good.result(0).outputs[0].tokens == answer_slowly(ask(*range(11), max_tokens=20))[0]
    assert good.result(0).reused_blocks == 0


def test_a_step_that_fails_ends_its_requests_and_the_executor_goes_on() -> None:
    executor = make(limits={"max_batch_size": 2})
    runner = runner_of(executor)
    runner.broken = {2}
    failed = [executor.submit(ask(1, 2, n)) for n in (3, 4)]
    later = executor.submit(ask(1, 2, 3))
    drain(executor)
    for handle in failed:
        with pytest.raises(RunnerError, match="fell off the bus"):
            handle.result(0)
    assert later.result(0).outputs[0].tokens == answer_slowly(ask(1, 2, 3))[0]
    assert executor.healthy and executor.batcher.pool.used == 0 and executor.statistics.read()["failed_total"] == 2


def test_a_runner_that_cannot_even_zero_gets_its_pools_anew() -> None:
    executor = make()
    runner = runner_of(executor)
    runner.broken, runner.cannot_zero = {2}, True
    failed = executor.submit(ask())
    executor.step()
    executor.step()
    waiting = executor.submit(ask(9, 9))
    executor.step()
    runner.cannot_zero = False
    for handle in (failed, waiting):
        with pytest.raises(RunnerError):
            handle.result(0)
    assert runner.allocations == 2
    after = executor.submit(ask())
    drain(executor)
    assert after.result(0).outputs[0].tokens == answer_slowly(ask())[0]


def test_a_runner_that_always_fails_is_not_healthy() -> None:
    executor = make()
    runner_of(executor).broken = set(range(1, 4))
    for _ in range(3):
        assert executor.healthy
        executor.submit(ask())
        executor.step()
    assert not executor.healthy
    handle = executor.submit(ask())
    drain(executor)
    assert handle.result(0) and executor.healthy


@pytest.mark.parametrize("when", [1, 3, 6])
def test_a_callback_that_raises_ends_its_own_request(when: int) -> None:
    executor, count = make(), 0

    def raise_late(update: Update) -> None:
        nonlocal count
        count += 1
        if count == when:
            raise ValueError("not my day")

    handle, other = executor.submit(ask(streaming=True), raise_late), executor.submit(ask(4))
    drain(executor)
    with pytest.raises(ServingError, match="not my day"):
        handle.result(0)
    assert other.result(0).outputs[0].tokens == answer_slowly(ask(4))[0]
    assert executor.batcher.pool.used == len(executor.batcher.pool.dirty)


# Cancelling and deadlines


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_cancelled_request_keeps_what_it_has_and_frees_its_blocks(steps: int, n: int) -> None:
    executor = make()
    request = ask(request_id="mine", num_return_sequences=n)
    handle = executor.submit(request)
    for _ in range(steps):
        executor.step()
    assert executor.cancel("mine") == 1 and executor.cancel("other") == 0
    executor.step()
    result = handle.result(0)
    assert [output.finish_reason for output in result.outputs] == [FinishReason.CANCELLED] * n
    assert [output.tokens for output in result.outputs] == [answer_slowly(request)[0][:steps]] * n
    assert executor.batcher.pool.used == 0 and executor.cancel("mine") == 0
    assert executor.statistics.read()["cancelled_total"] == 1


def count_steps_until_free(executor: Executor, handle: Handle) -> int:
    """From now on, until the blocks that are in use are those of others."""
    for count in range(50):
        others = {block for sequence in executor.batcher.scheduler.running for block in sequence.table}
        assert all(sequence.handle is not handle or not handle.done for sequence in executor.batcher.scheduler.running)
        if handle.done and executor.batcher.pool.used == len(others):
            return count
        executor.step()
    raise AssertionError("its blocks are never free")


# Where a request is when it is cancelled -> the executor, the request, and how it is known that it has come so far.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Handle], bool]]] = {
    "waiting": ({"limits": {"max_batch_size": 1}}, {}, lambda handle: True),
    "in the middle of its prompt": (
        {"limits": {"max_num_tokens": 8}},
        {"input_ids": tuple(range(1, 31))},
        lambda handle: handle.partial.timing.first_scheduled is not None,
    ),
    "generating": ({}, {}, lambda handle: len(handle.partial.outputs[0].tokens) == 3),
    "generating twice": ({}, {"num_return_sequences": 2}, lambda handle: len(handle.partial.outputs[1].tokens) == 3),
    "paused": (
        {"limits": {"num_blocks": 9, "max_seq_len": 32}, "policy": Policy.MAX_UTILIZATION},
        {"priority": Priority.P2},
        lambda handle: handle.partial.times_paused > 0,
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("during_a_step", [False, True])
def test_from_a_cancel_until_the_blocks_are_free_it_takes_one_step(place: str, during_a_step: bool) -> None:
    """And none is computed for it any more, but one that is being computed already."""
    settings, values, has_come = PLACES[place]
    executor = make(reuse_blocks=False, **settings)
    runner = runner_of(executor)
    company = executor.submit(ask(7, 8, max_tokens=28))
    handle = executor.submit(ask(**{"max_tokens": 24, **values}))
    executor.step()
    while not has_come(handle):
        executor.step()
    compute = runner.step

    def compute_and_cancel(inputs: dict[str, Any]) -> Any:
        handle.cancel()
        runner.step = compute  # type: ignore[method-assign]
        return compute(inputs)

    if during_a_step:
        runner.step = compute_and_cancel  # type: ignore[method-assign]
        executor.step()
    else:
        handle.cancel()
    tokens = [list(output.tokens) for output in handle.partial.outputs]
    steps = runner.steps
    assert not company.done and not handle.done
    assert count_steps_until_free(executor, handle) == 1
    assert [output.tokens for output in handle.result(0).outputs] == tokens
    assert (runner.steps, runner.log[-1][1]) == (steps + 1, 1)  # of that step, only the company was part
    drain(executor)
    assert company.result(0).outputs[0].tokens == answer_slowly(company.request)[0]


def test_a_cancel_while_a_step_is_computed_waits_for_no_other() -> None:
    """In the executor's own thread."""
    executor = make(reuse_blocks=False)
    runner, computing, go = runner_of(executor), threading.Event(), threading.Event()
    compute, ended_at = runner.step, list[int]()

    def wait_and_compute(inputs: dict[str, Any]) -> Any:
        logits = compute(inputs)
        if runner.steps == 3:
            computing.set()
            assert go.wait(10)
        return logits

    def note(update: Update) -> None:
        if update.is_final:
            ended_at.append(runner.steps)

    runner.step = wait_and_compute  # type: ignore[method-assign]
    company, handle = executor.submit(ask(7, max_tokens=60)), executor.submit(ask(max_tokens=60), note)
    executor.start()
    assert computing.wait(10)
    handle.cancel()
    go.set()
    assert len(handle.result(10).outputs[0].tokens) == 3
    executor.shutdown(drain=True)
    assert ended_at == [3]
    assert company.result(0).outputs[0].tokens == answer_slowly(company.request)[0]


def test_a_request_that_has_said_what_was_wanted_is_completed() -> None:
    """And not cancelled, though its connection is closed right after."""
    executor = make()
    handle = executor.submit(ask(max_tokens=60, num_return_sequences=2))
    for _ in range(3):
        executor.step()
    handle.finish()
    handle.cancel()
    drain(executor)
    assert [output.finish_reason for output in handle.result(0).outputs] == [FinishReason.STOP_WORDS] * 2
    counted = executor.statistics.read()
    assert (counted["completed_total"], counted["cancelled_total"]) == (1, 0)


def test_a_request_can_cancel_itself_from_its_callback() -> None:
    executor = make()
    handle = executor.submit(ask(streaming=True), lambda update: handle.cancel())
    drain(executor)
    assert len(handle.result(0).outputs[0].tokens) == 1


def test_time_runs_out() -> None:
    clock = Clock()
    executor = make(clock, limits={"max_batch_size": 1})
    running = executor.submit(ask(timeout=5.0, max_tokens=50))
    impatient = executor.submit(ask(queue_timeout=2.0))
    patient = executor.submit(ask(timeout=3.0))
    for now in (100.0, 101.0, 102.5, 103.0):
        clock.now = now
        executor.step()
        assert impatient.done is (now > 102) and patient.done is (now >= 103) and not running.done
    clock.now = 105.0
    executor.step()
    with pytest.raises(QueueTimeoutError, match=r"queue_timeout of 2.0 s"):
        impatient.result(0)
    assert patient.result(0).outputs[0].finish_reason is FinishReason.TIMED_OUT
    assert patient.result(0).outputs[0].tokens == []
    assert running.result(0).outputs[0].tokens == answer_slowly(ask(max_tokens=4))[0]
    assert executor.batcher.pool.used == 0


def test_a_started_request_has_no_queue_timeout() -> None:
    clock = Clock()
    executor = make(clock)
    handle = executor.submit(ask(queue_timeout=0.5))
    executor.step()
    clock.now += 10
    drain(executor)
    assert handle.result(0).outputs[0].finish_reason is FinishReason.LENGTH


def test_queues_are_limited_by_class() -> None:
    executor = make(limits={"max_batch_size": 1}, queue_limits={Priority.P1: 1})
    executor.submit(ask())
    with pytest.raises(QueueFullError, match="1 requests of class P1"):
        executor.submit(ask())
    executor.submit(ask(priority=Priority.P2))
    executor.step()  # the first one starts
    second = executor.submit(ask())
    with pytest.raises(QueueFullError):
        executor.submit(ask())
    second.cancel()
    executor.step()
    executor.submit(ask())
    assert executor.statistics.read()["rejected_total"] == 2
    drain(executor)


# Threads


def test_requests_from_many_threads() -> None:
    executor = make(policy=Policy.MAX_UTILIZATION)
    executor.start()
    requests = [ask(*range(n % 7 + 1), streaming=n % 2 == 0, max_tokens=n % 5 + 1) for n in range(60)]
    answers: dict[int, list[int]] = {}

    def read(n: int) -> None:
        answers[n] = [token for update in executor.submit(requests[n]) for token in update.tokens]

    threads = [threading.Thread(target=read, args=(n,)) for n in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    executor.shutdown()
    assert answers == {n: answer_slowly(request)[0] for n, request in enumerate(requests)}
    assert not executor.healthy and executor.batcher.pool.used == 0
    executor.check()


def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    executor = make()
    executor.start()
    handles = [executor.submit(ask(n, max_tokens=30)) for n in range(8)]
    executor.shutdown()
    assert all(handle.result(0).outputs[0].finish_reason is FinishReason.LENGTH for handle in handles)
    with pytest.raises(ShutdownError):
        executor.submit(ask())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_drain_that_takes_too_long_is_cut(threaded: bool) -> None:
    executor = make()
    runner = runner_of(executor)
    step = runner.step

    def slow(inputs: Any) -> Any:
        time.sleep(0.02)
        return step(inputs)

    runner.step = slow  # type: ignore[method-assign]
    if threaded:
        executor.start()
    handle = executor.submit(ask(max_tokens=150))
    executor.shutdown(timeout=0.2)
    with pytest.raises(ShutdownError, match="shuts down"):
        handle.result(0)


def test_a_fault_of_its_own_ends_the_requests_at_hand_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()
    plan, faults = executor.batcher.scheduler.plan, iter([True])

    def fail_once(now: float) -> Any:
        if next(faults, False):
            raise ZeroDivisionError("a bug")
        return plan(now)

    monkeypatch.setattr(executor.batcher.scheduler, "plan", fail_once)
    handle = executor.submit(ask())
    executor.start()
    with pytest.raises(ServingError, match="a bug"):
        handle.result(10)
    assert executor.submit(ask()).result(10).outputs[0].tokens == answer_slowly(ask())[0]
    executor.shutdown()


def test_nobody_waits_for_an_executor_that_cannot_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()

    def fail(*_: Any) -> Any:
        raise MemoryError("no pools")

    monkeypatch.setattr(executor.batcher.scheduler, "plan", fail)
    monkeypatch.setattr(executor.batcher.runner, "allocate", fail)
    handles = [executor.submit(ask()) for _ in range(3)]
    executor.start()
    for handle in handles:
        with pytest.raises(ServingError):
            handle.result(10)
    while executor.healthy:
        time.sleep(0.01)
    with pytest.raises(ShutdownError):
        executor.submit(ask())
    executor.shutdown()


def test_pins_through_the_door() -> None:
    executor = make()
    executor.start()
    beginning = tuple(range(12))
    assert executor.pin(beginning) == 0
    executor.submit(ask(*beginning, 1)).result(10)
    assert executor.pin(beginning) == 12 == executor.pin(beginning)
    assert executor.pin(beginning, "tenant") == 0
    assert executor.batcher.pool.pinned == 3
    executor.unpin(beginning)
    executor.unpin(beginning)
    assert executor.batcher.pool.pinned == 0
    executor.shutdown()


def test_tenants_do_not_share() -> None:
    executor = make()
    for salt, reused in (("a", 0), ("a", 2), ("b", 0)):
        handle = executor.submit(ask(*range(9), cache_salt=salt))
        drain(executor)
        assert handle.result(0).reused_blocks == reused


def test_metrics_have_the_names_of_tensorrt_llm() -> None:
    executor = make()
    executor.submit(ask())
    executor.step()
    metrics = {(family, labels): value for family, labels, value in executor.statistics.metrics()}
    assert metrics["nv_trt_llm_kv_cache_block_metrics", (("kv_cache_block_type", "used"),)] == 1
    assert metrics["nv_trt_llm_kv_cache_block_metrics", (("kv_cache_block_type", "max"),)] == 40
    assert metrics["nv_trt_llm_request_metrics", (("request_type", "active"),)] == 1
    batcher = "nv_trt_llm_inflight_batcher_metrics"
    assert metrics[batcher, (("inflight_batcher_specific_metric", "total_context_tokens"),)] == 3
    drain(executor)


def test_an_observer_sees_each_time() -> None:
    executor, seen = make(), list[str]()
    executor.statistics.on_observation = lambda name, priority, seconds: seen.append(f"{name} {priority.name}")
    executor.submit(ask(priority=Priority.P0))
    drain(executor)
    assert seen == ["queue_time P0", "time_to_first_token P0", "time_per_token P0"]
