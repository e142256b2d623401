"""What the benchmark of the all-to-all expects and counts."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import pytest

from benchmarks.all_to_all import DRAWINGS, V3, Layer, expect, hit_any, hit_kept, main, pad, reduce_all, run_ranks

SMALL = Layer(hidden=16, experts=8, chosen=3, groups=4, kept=2)


def every_choice(layer: Layer, kept: int) -> Iterator[tuple[int, ...]]:
    """All ways to draw, each as likely as the others: groups, then experts of them."""
    size = layer.experts // layer.groups
    for groups in combinations(range(layer.groups), kept):
        yield from combinations([e for e in range(layer.experts) if e // size in groups], layer.chosen)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("kept", "draw"), [(4, hit_any), (2, hit_kept)])
def test_expectations_are_those_of_all_choices(ranks: int, kept: int, draw: object) -> None:
    choices = list(every_choice(SMALL, kept))
    hits = sum(any(e // (SMALL.experts // ranks) == 0 for e in choice) for choice in choices)
    assert draw in DRAWINGS.values()
    assert draw(SMALL, ranks) == Fraction(hits, len(choices))  # type: ignore[operator]


def test_v3_goes_where_it_says() -> None:
    """Of 7168 bf16 elements, 8 experts and weights a message, at 8 ranks of a group each."""
    there, back = expect(V3, 8, "model", hit_kept)
    assert back == pytest.approx(float(7 * hit_kept(V3, 8)) * 14336)
    assert there / back == pytest.approx((14336 + 64) / 14336)
    assert expect(V3, 8, "fp8", hit_kept)[0] / there == pytest.approx((7168 + 4 + 64 + 12) / 14400)
    assert float(8 * hit_kept(V3, 8)) <= 4 < float(8 * hit_any(V3, 8))
    assert sum(pad(V3, 64)) == 63 * 4 * (2 * 14336 + 4)  # of 4 experts a rank, all may be a token's
    assert reduce_all(V3, 8) == 2 * 7 * 14336


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[-1].split() == ["all-reduce", "201", "889", "1806"]


def test_what_two_processes_count_is_what_their_tokens_cost() -> None:
    """Each checks its own count against its tokens' experts."""
    counted = run_ranks(SMALL, 2)
    drawings = [(draw, payload) for draw in DRAWINGS.values() for payload in ("model", "fp8")]
    for found, (draw, payload) in zip(counted, drawings, strict=True):
        assert found == pytest.approx(sum(expect(SMALL, 2, payload, draw)), rel=0.15)
