from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.workspace import GEMM_SCRATCH, Buffer, Schedule, place


def test_a_buffer_takes_the_place_of_a_dead_one() -> None:
    plan = Schedule()
    (a,) = plan.kernel(a=4096)
    (b,) = plan.kernel(a, b=2048)
    (c,) = plan.kernel(b, c=1024)  # a is dead
    plan.kernel(c)
    placed = place(plan.buffers)
    assert placed.terms == (("a", 4096), ("b", 2048))
    assert placed.nbytes == 6144


def test_inputs_and_outputs_of_one_kernel_never_share() -> None:
    plan = Schedule()
    (a,) = plan.kernel(a=512)
    plan.kernel(a, b=512)
    assert place(plan.buffers).nbytes == 1024


def test_regions_are_aligned_and_the_sum_rounded() -> None:
    plan = Schedule()
    plan.kernel(a=1, b=1)
    assert [nbytes for _, nbytes in place(plan.buffers).terms] == [128, 128]
    assert place(plan.buffers).nbytes == 512


def test_streams_of_a_fork_share_nothing_but_what_follows_does() -> None:
    plan = Schedule()
    plan.fork()
    (a,) = plan.gemm(a=128)
    plan.next_stream()
    (b,) = plan.gemm(b=128)
    plan.join()
    assert place(plan.buffers).nbytes >= 2 * GEMM_SCRATCH
    plan.gemm(a, b)
    assert place(plan.buffers).nbytes < 3 * GEMM_SCRATCH


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=40),
)
def test_placing_is_no_smaller_than_what_lives_at_once_and_no_larger_than_all(rows: list[tuple[int, int, int]]) -> None:
    buffers = [
        Buffer(name=str(i), nbytes=128 * size, born=born, dies=born + life) for i, (size, born, life) in enumerate(rows)
    ]
    total = place(buffers).nbytes
    peak = max(sum(b.nbytes for b in buffers if b.born <= step <= b.dies) for step in range(41))
    assert peak <= total <= sum(b.nbytes for b in buffers) + 511
    alone = all(a.dies < b.born or b.dies < a.born for a, b in combinations(buffers, 2))
    if alone:
        assert total < max(b.nbytes for b in buffers) + 512
