"""The order in which cached blocks are given up: lowest priority first, then least recently used."""

from __future__ import annotations

import heapq
import itertools

from pipeline.runtime.retention import DEFAULT, ORDINARY, Keep

# Heaps keep what was taken out of their middle until it comes up; beyond so many times what is there, they are rebuilt.
SLACK = 2


class EvictionOrder:
    """Blocks, each with its priority, the moment it came in and the one at which its priority ends."""

    def __init__(self) -> None:
        self._moments = itertools.count()
        self._entries: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []  # priority, moment, block
        self._ends: list[tuple[float, int, int]] = []  # seconds, moment, block

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def add(self, block: int, now: float, keep: Keep = ORDINARY) -> None:
        """A block that is not here, as the one used last."""
        moment = next(self._moments)
        self._push(block, keep.priority, moment)
        if keep.duration is not None and keep.priority != DEFAULT:
            heapq.heappush(self._ends, (now + keep.duration, moment, block))
        self._shrink()

    def discard(self, block: int) -> None:
        """Without effect on a block that is not here."""
        self._entries.pop(block, None)

    def pop(self) -> int:
        """Takes out the block that goes first; there must be one."""
        while True:
            priority, moment, block = heapq.heappop(self._heap)
            if self._entries.get(block) == (priority, moment):
                del self._entries[block]
                return block

    def expire(self, now: float) -> None:
        """Blocks whose time is over are ordinary ones from now on, used when they were."""
        while self._ends and self._ends[0][0] <= now:
            _, moment, block = heapq.heappop(self._ends)
            if self._is_current(block, moment):
                self._push(block, DEFAULT, moment)

    def _is_current(self, block: int, moment: int) -> bool:
        return block in self._entries and self._entries[block][1] == moment

    def _push(self, block: int, priority: int, moment: int) -> None:
        self._entries[block] = (priority, moment)
        heapq.heappush(self._heap, (priority, moment, block))

    def _shrink(self) -> None:
        most = SLACK * len(self._entries) + 64
        if len(self._heap) > most:
            self._heap = [(*entry, block) for block, entry in self._entries.items()]
            heapq.heapify(self._heap)
        if len(self._ends) > most:
            self._ends = [end for end in self._ends if self._is_current(end[2], end[1])]
            heapq.heapify(self._ends)
