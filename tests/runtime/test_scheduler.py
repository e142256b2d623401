"""Decisions, one by one; the accounts are checked in every mix of test_interleavings.py."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.runtime.blocks import BlockPool, hash_blocks
from pipeline.runtime.errors import RequestError
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.retention import Keep, Retention, TokenRange
from pipeline.runtime.scheduler import Schedule, Scheduler
from pipeline.runtime.sequence import Sequence

SIZE = 4


class Bench:
    """A scheduler whose every token is 1."""

    def __init__(self, *, policy: Policy = Policy.GUARANTEED_NO_EVICT, reuse: bool = True, **values: Any) -> None:
        self.options = {key: values.pop(key) for key in ("preempt", "ageing") if key in values}
        defaults = {"num_blocks": 41, "max_seq_len": 160, "max_batch_size": 4, "max_num_tokens": 16}
        limits = Limits(block_size=SIZE, **{**defaults, **values})
        self.pool = BlockPool(limits.num_blocks, reuse=reuse)
        self.scheduler = Scheduler(limits, self.pool, policy, **self.options)
        self.order = 0

    def add(
        self,
        prompt: int | list[int],
        answer: int = 4,
        priority: int = 1,
        now: float = 0.0,
        n: int = 1,
        retention: Retention | None = None,
    ) -> Sequence:
        """A number stands for a prompt that nobody shares."""
        self.order += 1
        tokens = [1000 * self.order + place for place in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request(
            input_ids=tuple(tokens),
            max_tokens=answer,
            priority=Priority(priority),
            num_return_sequences=n,
            retention=retention,
        )
        sequence = Sequence(request, order=self.order, arrival=now)
        self.scheduler.add(sequence)
        return sequence

    def step(self, now: float = 0.0) -> Schedule:
        """A step that goes well; whoever is done leaves."""
        schedule = self.scheduler.plan(now)
        for work in schedule.work:
            is_last = work.is_last
            self.scheduler.advance(work)
            for sequence in self.scheduler.fork(work.sequence) if is_last else ():
                sequence.tokens.append(1)
                if len(sequence.tokens) - sequence.prompt_length == sequence.request.max_tokens:
                    self.scheduler.remove(sequence)
        self.scheduler.check()
        return schedule


def counts(schedule: Schedule) -> dict[int, int]:
    return {work.sequence.order: work.count for work in schedule.work}


def test_prompts_come_in_chunks_beside_what_generates() -> None:
    bench = Bench()
    bench.add(5)
    bench.add(30)
    assert [counts(bench.step()) for _ in range(4)] == [{1: 5, 2: 11}, {1: 1, 2: 15}, {1: 1, 2: 4}, {1: 1, 2: 1}]


def test_more_prompts_fill_a_step_that_padding_would_empty() -> None:
    bench = Bench(max_padded_rows=16)
    for _ in range(3):
        bench.add(20)
    assert [counts(bench.step()) for _ in range(2)] == [{1: 16}, {1: 4, 2: 5, 3: 5}]


def test_chunks_and_single_tokens_take_turns_where_the_context_profile_is_small() -> None:
    bench = Bench(context_batch=2, max_chunk=4)
    for _ in range(2):
        bench.add(4, answer=9)
    bench.step()
    bench.add(12)
    assert [counts(bench.step()) for _ in range(6)] == [{1: 1, 2: 1}, {3: 4}] * 3


def test_single_tokens_and_chunks_take_turns_where_padding_costs_more_than_it_saves() -> None:
    bench = Bench(mixed=False)
    bench.add(5)
    bench.add(30)
    assert [counts(bench.step()) for _ in range(6)] == [{1: 5, 2: 11}, {1: 1}, {2: 16}, {1: 1}, {2: 3}, {1: 1, 2: 1}]


@pytest.mark.parametrize("mixed", [True, False])
def test_a_prompt_waits_neither_for_a_turn_nor_for_chunks_of_lower_classes(mixed: bool) -> None:
    bench = Bench(mixed=mixed)
    bench.add(4, answer=9, priority=2)
    bench.add(40, priority=2)
    bench.step()
    bench.step()
    beside = {1: 1} if mixed else {}
    bench.add(6, priority=0)
    assert counts(bench.step()) == {3: 6, **beside}
    bench.add(6, priority=0)
    assert counts(bench.step()) == ({4: 6, 3: 1, 1: 1} if mixed else {1: 1, 3: 1})  # its own class has its turn


def test_generation_profiles_serve_everyone_in_turn() -> None:
    bench = Bench(generation=((3, 12), (1, 160)), max_num_tokens=64)
    for prompt in (5, 6, 20):
        bench.add(prompt, answer=6)
    bench.step()
    assert [counts(bench.step()) for _ in range(4)] == [{1: 1, 2: 1}, {3: 1}, {1: 1, 2: 1}, {3: 1}]


def test_what_is_to_be_retained_outlives_what_was_used_after_it() -> None:
    bench = Bench(num_blocks=8)
    keep = Retention((TokenRange(0, 4, Keep(90)), TokenRange(4, 8, Keep(10, 5.0))), answer=Keep(0))
    system, middle = [7] * 4, [8] * 4
    bench.add([*system, *middle], answer=9, retention=keep)  # its four blocks can be found
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
    bench.add(13, answer=4)  # 4 blocks
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
    found = bench.pool.find(hash_blocks([*system, *middle], SIZE))
    assert len(found) == 2 and bench.pool.cached == 7  # all but one of the answer
    bench.add(13, answer=4)
    bench.step()
    assert bench.pool.find(hash_blocks([*system, *middle], SIZE)) == found[:1]  # answer, middle, then others'


def test_who_finds_a_block_says_how_long_it_is_kept_from_now_on() -> None:
    bench = Bench(num_blocks=5)
    system = [7] * 4
    for retention in (None, Retention((TokenRange(0, None, Keep(90)),))):
        bench.add([*system, 1], answer=1, retention=retention)
        bench.step()
    bench.add(8, answer=1)
    bench.step()
    bench.add(8, answer=1)
    bench.step()
    assert len(bench.pool.find(hash_blocks(system, SIZE))) == 1


def test_guaranteed_no_evict_waits_for_the_longest_answer() -> None:
    bench = Bench(num_blocks=11)
    bench.add(8, answer=17)  # 6 blocks
    bench.add(8, answer=13)  # 5
    bench.add(4, answer=1)  # 1, but nobody overtakes
    assert counts(bench.step()) == {1: 8}
    for _ in range(16):
        assert list(counts(bench.step())) == [1]
    assert list(counts(bench.step())) == [2, 3]


def test_max_utilization_starts_both_and_pauses_the_later() -> None:
    bench = Bench(num_blocks=11, policy=Policy.MAX_UTILIZATION, reuse=False)
    first, later = bench.add(8, answer=17), bench.add(8, answer=17)
    assert counts(bench.step()) == {1: 8, 2: 8}
    schedules = [bench.step() for _ in range(40)]
    paused = [sequence for schedule in schedules for sequence in schedule.paused]
    assert paused and set(paused) == {later}
    again = next(work for schedule in schedules for work in schedule.work if work.sequence is later and work.count > 1)
    assert again.count > 8  # what it had generated is computed again with its prompt
    assert not bench.scheduler.running and not len(bench.scheduler.waiting)
    assert len(first.tokens) == len(later.tokens) == 25


def test_max_utilization_leaves_what_runs_its_next_block() -> None:
    bench = Bench(num_blocks=5, policy=Policy.MAX_UTILIZATION)
    bench.add(8, answer=9)
    for _ in range(3):
        bench.step()
    bench.add(4, answer=1)  # the one free block will be wanted by the first
    assert bench.step().started == []


def test_what_a_paused_sequence_leaves_in_the_cache_is_not_computed_again() -> None:
    bench = Bench(num_blocks=21, policy=Policy.GUARANTEED_NO_EVICT, max_batch_size=1)
    low = bench.add(12, answer=8, priority=2)
    for _ in range(3):
        bench.step()
    bench.add(4, answer=1, priority=0)
    assert bench.step().paused == [low]
    assert counts(bench.step()) == {1: 3}  # of 15 tokens, which fill three blocks


@pytest.mark.parametrize("preempt", [True, False])
def test_a_higher_class_takes_the_place_of_a_lower_one(preempt: bool) -> None:
    bench = Bench(max_batch_size=2, preempt=preempt)
    bench.add(4, answer=20, priority=1)
    low = bench.add(4, answer=20, priority=2)
    bench.step()
    high = bench.add(4, priority=0)
    schedule = bench.step()
    assert schedule.started == ([high] if preempt else [])
    assert schedule.paused == ([low] if preempt else [])


def test_only_as_many_are_paused_as_help_and_none_if_that_is_not_enough() -> None:
    bench = Bench(num_blocks=13)
    low = [bench.add(4, answer=9, priority=2) for _ in range(3)]  # 3 blocks each
    bench.step()
    bench.add(8, answer=17, priority=1)  # 6, of which 3 are free
    assert bench.step().paused == low[:0:-1][:1]
    bench = Bench(num_blocks=13)
    bench.add(4, answer=17, priority=0)  # 5
    bench.add(4, answer=9, priority=2)  # 3
    bench.step()
    bench.add(8, answer=29, priority=1)  # 9: 4 free and 3 more are too few
    assert bench.step().paused == []


def test_blocks_that_it_would_share_with_whom_it_pauses_are_not_gained() -> None:
    bench = Bench(num_blocks=7, max_num_tokens=64)
    beginning = list(range(500, 508))
    bench.add(4, answer=5, priority=0)  # 2 blocks of 6
    bench.add([*beginning, 1], answer=4, priority=2)  # 3
    bench.step()
    bench.add([*beginning, 2], answer=12, priority=1)  # 5, of which the lower one holds 2
    assert bench.step().paused == []


def test_equals_do_not_take_each_others_place() -> None:
    bench = Bench(max_batch_size=1)
    bench.add(4, answer=20, priority=1)
    bench.step()
    bench.add(4, priority=1)
    assert bench.step().paused == []


def test_the_lowest_class_is_served_in_the_end() -> None:
    """A stream of higher requests that never lets up: with ageing the low one starts, and is not paused again."""
    for ageing, served in ((5.0, True), (None, False)):
        bench = Bench(max_batch_size=1, ageing=ageing)
        low = bench.add(4, answer=3, priority=2)
        done = False
        for now in range(60):
            if now % 3 == 0:
                bench.add(4, answer=4, priority=0, now=float(now))
            bench.step(float(now))
            done |= len(low.tokens) == 7
        assert done is served


def test_a_shared_beginning_is_computed_once() -> None:
    bench = Bench(max_num_tokens=64)
    beginning = list(range(500, 516))
    for _ in range(4):
        bench.add([*beginning, 7, 8])
    assert counts(bench.step()) == {1: 18}  # the others wait one step for it
    assert counts(bench.step()) == {1: 1, 2: 2, 3: 2, 4: 2}
    tables = [sequence.table[:4] for sequence in bench.scheduler.running]
    assert all(table == tables[0] for table in tables)


def test_nobody_waits_for_the_beginning_of_a_lower_class() -> None:
    bench = Bench(max_num_tokens=8)
    prompt = list(range(500, 516))
    bench.add(prompt, priority=2)
    bench.step()
    bench.add(prompt, priority=0)
    assert counts(bench.step()) == {2: 8}  # what the other had computed is shared, the rest is not waited for


def test_a_whole_known_prompt_still_computes_its_last_token() -> None:
    bench = Bench(max_num_tokens=64)
    prompt = list(range(500, 508))
    bench.add(prompt, answer=1)
    bench.step()
    bench.add(prompt, answer=1)
    assert counts(bench.step()) == {2: 4}


def test_blocks_found_in_the_cache_are_not_counted_as_free_as_well() -> None:
    bench = Bench(num_blocks=11)
    beginning = list(range(500, 508))
    bench.add([*beginning, 1], answer=1)
    bench.step()
    bench.add(8, answer=17)  # 6 blocks of 10
    bench.step()
    bench.add([*beginning, 2], answer=12)  # 5, two of them known: 3 new ones would fit, but not 5 in all
    assert bench.step().started == []


def test_sequences_of_one_request_share_its_prompt_and_copy_what_is_not_full() -> None:
    bench = Bench(num_blocks=10)
    bench.add(6, answer=4, n=3)  # 2 blocks, then 9 tokens each: 1 + 3 * 2
    bench.step()
    running = bench.scheduler.running
    assert [sequence.index for sequence in running] == [0, 1, 2]
    assert len({tuple(sequence.table) for sequence in running}) == 1 and bench.pool.used == 2
    schedule = bench.step()
    assert len(schedule.copies) == 2 and len({copy for _, copy in schedule.copies}) == 2
    assert len({sequence.table[0] for sequence in running}) == 1
    assert len({sequence.table[1] for sequence in running}) == 3
    while bench.scheduler.running:
        bench.step()
    assert bench.pool.used == 0


def test_copies_to_come_are_reserved() -> None:
    bench = Bench(num_blocks=10)
    bench.add(6, answer=4, n=3)  # 7 blocks of 9, of which 2 are held after the prompt
    bench.step()
    bench.add(8, answer=5)  # 3
    assert bench.step().started == []


def test_what_can_never_run_is_refused() -> None:
    bench = Bench(num_blocks=5)
    bench.add(8, answer=9)
    with pytest.raises(RequestError, match="needs 5 cache blocks of 4"):
        bench.add(8, answer=10)
    with pytest.raises(RequestError, match="num_return_sequences is 5"):
        bench.add(1, n=5)
    with pytest.raises(RequestError, match="needs 6 cache blocks of 4"):
        bench.add(8, answer=9, n=2)  # 2 for the prompt, 2 each


def test_pins_keep_a_beginning_but_never_what_a_request_needs() -> None:
    bench = Bench(num_blocks=9, max_num_tokens=64)
    prompt = list(range(500, 509))
    bench.add(prompt, answer=1)
    bench.step()
    found = bench.pool.find(bench.add(prompt, answer=24).full_hashes(SIZE))  # it needs 8 blocks: all there are
    assert len(found) == 2 and not bench.scheduler.pin(found)
    while bench.step().work:
        pass
    assert bench.pool.find(hash_blocks(prompt, SIZE)) == found and bench.scheduler.pin(found)
    bench.add(8, answer=17)  # 6 blocks: the other 6
    with pytest.raises(RequestError, match="needs 7 cache blocks of 6"):
        bench.add(8, answer=21)
    while bench.step().work:
        pass
    assert bench.pool.pinned == 2 and bench.pool.find(hash_blocks(prompt, SIZE)) == found
