"""Which part of a retention a block belongs to. The expected values are those of TensorRT-LLM's documentation: a range
counts for the blocks whose first token it holds."""

from __future__ import annotations

import pytest

from pipeline.runtime.retention import Keep, Retention, TokenRange


def priorities(ranges: list[tuple[int, int | None, int]], size: int, length: int) -> list[int | None]:
    retention = Retention(tuple(TokenRange(start, end, Keep(priority)) for start, end, priority in ranges), Keep(3))
    found = [retention.of_block(first, length) for first in range(0, length, size)]
    return [keep and keep.priority for keep in found]


@pytest.mark.parametrize(
    ("ranges", "size", "length", "expected"),
    [
        ([(0, 17, 80)], 16, 48, [80, 80, None]),
        ([(0, 64, 80), (64, 128, 50)], 64, 256, [80, 50, None, None]),
        ([(0, 63, 80), (63, 127, 30)], 32, 127, [80, 80, 30, 30]),
        ([(0, 1, 80), (1, 2, 5)], 32, 128, [80, None, None, None]),
        ([(40, None, 80)], 16, 80, [None, None, None, 80, 80]),
        ([], 16, 32, [None, None]),
    ],
)
def test_ranges(ranges: list[tuple[int, int | None, int]], size: int, length: int, expected: list[int | None]) -> None:
    assert priorities(ranges, size, length) == expected


def test_blocks_that_begin_in_the_answer_are_the_answers() -> None:
    retention = Retention((TokenRange(0, None, Keep(80)),), Keep(3, 1.0))
    assert retention.of_block(16, 17) == Keep(80)
    assert retention.of_block(16, 16) == Keep(3, 1.0)
