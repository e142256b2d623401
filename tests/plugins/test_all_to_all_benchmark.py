"""What the benchmark of the all-to-all expects and counts, and what the plan says by the same formulas."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from benchmarks.all_to_all import DRAWINGS, PADDED, REDUCED, V3, main, run_ranks
from benchmarks.wire import count_sent
from pipeline.engine.exchanges import RoutedLayer, expect_sparse, hit_rank, pad, reduce_all

SMALL = RoutedLayer(dtype="bfloat16", hidden=16, experts=8, chosen=3, groups=4, kept=2)


def every_choice(layer: RoutedLayer) -> Iterator[tuple[int, ...]]:
    """All ways to draw, each as likely as the others: groups, then experts of them."""
    size = layer.experts // layer.groups
    for groups in combinations(range(layer.groups), layer.kept):
        yield from combinations([e for e in range(layer.experts) if e // size in groups], layer.chosen)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "kept"), [(4, 4), (4, 2), (1, 1)])
def test_expectations_are_those_of_all_choices(ranks: int, groups: int, kept: int) -> None:
    layer = replace(SMALL, groups=groups, kept=kept)
    choices = list(every_choice(layer))
    hits = sum(any(e // (SMALL.experts // ranks) == 0 for e in choice) for choice in choices)
    assert hit_rank(layer, ranks) == Fraction(hits, len(choices))


def test_v3_goes_where_it_says() -> None:
    """Of 7168 bf16 elements, 8 experts and weights a message, at 8 ranks of a group each."""
    any_group = replace(V3, kept=8)
    there, back = expect_sparse(V3, 8, "model")
    assert back == pytest.approx(float(7 * hit_rank(V3, 8)) * 14336)
    assert there / back == pytest.approx((14336 + 64) / 14336)
    assert expect_sparse(V3, 8, "fp8")[0] / there == pytest.approx((7168 + 4 + 64 + 12) / 14400)
    assert float(8 * hit_rank(V3, 8)) <= 4 < float(8 * hit_rank(any_group, 8))
    assert sum(pad(V3, 64)) == 63 * 4 * (2 * 14336 + 4)  # of 4 experts a rank, all may be a token's
    assert reduce_all("bfloat16", 7168, 8) == 2 * 7 * 14336


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[-1].split() == ["all-reduce", "201", "889", "1806"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_what_processes_count_is_what_their_tokens_cost(ranks: int) -> None:
    """Each checks its own count of moe_all_to_all against its tokens' experts, which are drawn. What has no choice is
    on the wire as expected, to the byte."""
    counted = {name: (found, wanted) for name, found, wanted in run_ranks(SMALL, ranks)}
    assert len(counted) == 2 * len(DRAWINGS) + 2
    for name in (PADDED, REDUCED):
        found, wanted = counted.pop(name)
        assert found == wanted > 0
    for found, wanted in counted.values():
        assert found == pytest.approx(wanted, rel=0.15)


def test_what_was_sent_is_counted_once_it_has_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            before = count_sent()
            for size in (1, 500, 5000):
                here.sendall(bytes(size))
                there.sendall(bytes(10 * size))
                assert count_sent() - before == 11 * size
                before = count_sent()
