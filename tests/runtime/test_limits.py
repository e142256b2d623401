from __future__ import annotations

from typing import Any

import pytest

from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError
from pipeline.runtime.limits import Limits


def limits(**values: Any) -> Limits:
    defaults = {"num_blocks": 9, "block_size": 8, "max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 32}
    return Limits(**{**defaults, **values})


@pytest.mark.parametrize(
    "values",
    [
        {"num_blocks": 1},
        {"block_size": 0},
        {"max_batch_size": 0},
        {"max_num_tokens": -1},
        {"max_chunk": 0},
        {"max_padded_rows": 0},
        {"generation": ((4, 32),)},
    ],
)
def test_contradictions_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError):
        limits(**values)


def test_blocks_and_chunks() -> None:
    assert [limits().blocks_for(n) for n in (1, 8, 9)] == [1, 1, 2]
    assert limits().chunk_for(3) == 32
    assert limits(max_chunk=10).chunk_for(3) == 10
    assert [limits(max_padded_rows=40).chunk_for(batch) for batch in (1, 3, 100)] == [32, 13, 1]
    assert limits(context_batch=2).context_sequences == 2 and limits(max_num_tokens=3).context_sequences == 3


def test_the_rectangle_that_takes_most_is_chosen() -> None:
    engine = limits(generation=((4, 16), (2, 64)))
    assert engine.fit_generation([5, 9, 16, 3]) == [True] * 4
    assert engine.fit_generation([5, 40, 16, 3]) == [True, False, True, True]
    assert engine.fit_generation([40, 5, 16, 3]) == [True, True, False, False]  # the first one always goes
    assert limits().fit_generation([60, 1, 2, 3]) == [True] * 4


def test_an_engines_limits() -> None:
    build = BuildLimits(
        max_seq_len=1024,
        max_batch_size=16,
        max_num_tokens=256,
        generation=(Rectangle(batch=16, length=256), Rectangle(batch=4, length=1024)),
        block_size=32,
        max_blocks=200,
    )
    made = Limits.of_engine(build)
    profile = build.profiles()[0].maximum
    assert made.num_blocks == 200 and made.generation == ((16, 256), (4, 1024))
    assert (made.max_num_tokens, made.context_sequences, made.chunk_for(4)) == (
        profile["T"],
        profile["B"],
        profile["Q"],
    )
    assert Limits.of_engine(build, 50).num_blocks == 50
