"""The ranks of a group as threads of one process, for what needs several and no wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from plugins.transport import Traffic

R = TypeVar("R")


class Meeting:
    """Where ranks hand each other their rows: all bring theirs, then all fetch."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.brought = threading.Barrier(ranks), [[torch.empty(0)]] * ranks


class MeetingTransport:
    def __init__(self, meeting: Meeting, ranks: int, rank: int) -> None:
        self.ranks, self.rank, self.traffic = ranks, rank, Traffic()
        self.meeting = meeting

    def exchange(
        self, source: torch.Tensor, target: torch.Tensor, sends: Sequence[int], receives: Sequence[int], stream: int
    ) -> None:
        self.meeting.brought[self.rank] = list(torch.split(source.clone(), list(sends)))
        self.meeting.barrier.wait(60)
        came = [parts[self.rank] for parts in self.meeting.brought]
        assert [len(part) for part in came] == list(receives)
        target[: sum(receives)] = torch.cat(came)
        self.meeting.barrier.wait(60)


def run_ranks(ranks: int, work: Callable[[MeetingTransport], R]) -> list[R]:
    """What each rank's `work` returns. Raises what one raises."""
    meeting = Meeting(ranks)

    def run(rank: int) -> R:
        try:
            return work(MeetingTransport(meeting, ranks, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        done = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # what broke the barrier, before those that it kept
    return [future.result() for future in done]
