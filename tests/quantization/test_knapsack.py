"""The knapsack against every combination there is."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeline.quantization import knapsack


def brute_force(costs: list[list[float]], values: list[list[float]], limit: float) -> float | None:
    found = [
        sum(row[i] for row, i in zip(values, picks, strict=True))
        for picks in itertools.product(*(range(len(row)) for row in costs))
        if sum(row[i] for row, i in zip(costs, picks, strict=True)) <= limit
    ]
    return min(found, default=None)


def draw(seed: int, whole: bool) -> tuple[list[list[float]], list[list[float]], float]:
    chance = random.Random(seed)
    shape = [chance.randint(1, 5) for _ in range(6)]
    costs = [[chance.randint(1, 40) if whole else 40 * chance.random() for _ in range(n)] for n in shape]
    values = [[chance.random() for _ in range(n)] for n in shape]
    least, most = (sum(pick(row) for row in costs) for pick in (min, max))
    return costs, values, chance.randint(int(least), int(most)) if whole else chance.uniform(least, most)


def total(rows: list[list[float]], chosen: list[int]) -> float:
    return sum(row[i] for row, i in zip(rows, chosen, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_whole_costs_are_solved_exactly(seed: int) -> None:
    costs, values, limit = draw(seed, whole=True)
    chosen = knapsack.select(costs, values, limit)
    assert chosen is not None and total(costs, chosen) <= limit
    assert total(values, chosen) == pytest.approx(brute_force(costs, values, limit))


@pytest.mark.parametrize("seed", range(20))
def test_other_costs_to_the_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "STEPS", 500)
    costs, values, limit = draw(seed, whole=False)
    chosen = knapsack.select(costs, values, limit)
    assert chosen is not None and total(costs, chosen) <= limit
    room = limit - sum(min(row) for row in costs)
    best, nearly = brute_force(costs, values, limit), brute_force(costs, values, limit - room * len(costs) / 500)
    assert best is not None and nearly is not None
    assert best <= total(values, chosen) + 1e-12 <= nearly + 2e-12


def test_what_is_left_is_spent() -> None:
    """Rounding up to steps would leave the second exchange out."""
    costs = [[0.0, 10_000.4], [0.0, 9_999.6], [0.0, 30_000.0]]
    assert knapsack.select(costs, [[1.0, 0.0], [1.0, 0.0], [1.0, 0.5]], 20_000.0) == [1, 1, 0]


def test_too_little_room() -> None:
    assert knapsack.select([[3, 4], [5]], [[0, 0], [0]], 7) is None
    assert knapsack.select([[3, 4], [5]], [[0, 0], [0]], 8) == [0, 0]
