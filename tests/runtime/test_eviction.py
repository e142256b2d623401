"""The order against a plain list that is searched."""

from __future__ import annotations

import random

from pipeline.runtime.eviction import EvictionOrder
from pipeline.runtime.retention import DEFAULT, Keep


class Plain:
    """The same order, by looking at everything."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, Keep, float]] = []  # the least recently used first

    def priority(self, keep: Keep, came: float, now: float) -> int:
        expired = keep.duration is not None and came + keep.duration <= now
        return DEFAULT if expired else keep.priority

    def pop(self, now: float) -> int:
        first = min(self.blocks, key=lambda entry: self.priority(entry[1], entry[2], now))
        self.blocks.remove(first)
        return first[0]


def test_against_a_plain_list() -> None:
    random_ = random.Random(0)
    for _ in range(40):
        order, plain, now = EvictionOrder(), Plain(), 0.0
        for _ in range(200):
            now += random_.random()
            order.expire(now)
            here = [block for block, _, _ in plain.blocks]
            act = random_.random()
            if act < 0.5:
                block = random_.choice([n for n in range(300) if n not in here])
                keep = Keep(random_.choice([0, 10, 35, 90]), random_.choice([None, 0.0, 3.0, 30.0]))
                order.add(block, now, keep)
                order.expire(now)
                plain.blocks.append((block, keep, now))
            elif here and act < 0.7:
                block = random_.choice(here)
                order.discard(block)
                plain.blocks = [entry for entry in plain.blocks if entry[0] != block]
            elif here:
                assert order.pop() == plain.pop(now)
            assert len(order) == len(plain.blocks)
            assert all(block in order for block, _, _ in plain.blocks)
        while plain.blocks:
            assert order.pop() == plain.pop(now)


def test_a_block_that_comes_and_goes_leaves_nothing_behind() -> None:
    order = EvictionOrder()
    for _ in range(10_000):
        order.add(1, 0.0, Keep(90, 1e6))
        order.discard(1)
    assert len(order) == 0
    assert len(order._heap) < 100 and len(order._ends) < 100
