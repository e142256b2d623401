"""The waiting line: one queue for each priority class, each in order of arrival."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from pipeline.runtime.request import Priority
from pipeline.runtime.sequence import Rank, Sequence


def _place(sequence: Sequence) -> tuple[int, int]:
    return sequence.order, sequence.index


class WaitingLine:
    """`ageing`: seconds after which a sequence counts as one class higher; None: never."""

    def __init__(self, ageing: float | None) -> None:
        self.ageing = ageing
        self._queues: dict[Priority, list[Sequence]] = {priority: [] for priority in Priority}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        """At its place by arrival: one that was paused comes before those that came after it."""
        insort(self._queues[sequence.request.priority], sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.priority]
        del queue[bisect_left(queue, _place(sequence), key=_place)]

    def in_order(self, now: float) -> Iterator[Sequence]:
        """By rank. Within a class the earlier never ranks below the later, so that the queues only need merging. The
        line must not change meanwhile."""

        def key(sequence: Sequence) -> Rank:
            return sequence.rank(now, self.ageing)

        return heapq.merge(*self._queues.values(), key=key)
