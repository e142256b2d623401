"""The runner of a parallel model: this process is rank 0 and leads, a process for each other rank follows.

The executor sees one runner. Blocks are the same on every rank, and so are tables and steps: the leader hands a step's
inputs to all, runs its own part, and has the logits from the last pipeline stage.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.runtime.errors import RunnerError
from pipeline.runtime.rank_process import Job, put, speaks, take
from pipeline.runtime.runner import Blocks, Inputs
from pipeline.sharding import Parallel, Rank

if TYPE_CHECKING:
    import torch

START_S = 600.0  # until every rank has its weights
END_S = 5.0
DYING_S = 2.0  # from a rank's last sign until its process has ended
_BROKEN = "load the model again: its ranks have lost each other"


class RankGroup:
    """A runner (runner.py). A context manager; closing it ends the ranks.

    maker, arguments: see rank_process.Job. Raises RunnerError where a rank cannot start, with its reason. A group of
    which a rank failed, or died, is of no more use: every later call raises RunnerError. A process leads one at a time.
    """

    def __init__(self, parallel: Parallel, maker: str, arguments: Mapping[str, Any]) -> None:
        self.parallel = parallel
        self._failure: str | None = None
        self._followers: list[_Follower] = []
        self._folder = tempfile.TemporaryDirectory(prefix="trtseek-ranks-")
        job = Job(
            parallel=parallel,
            address=f"file://{self._folder.name}/meeting",
            maker=maker,
            arguments=arguments,
            threads=max(1, len(os.sched_getaffinity(0)) // parallel.world),
        )
        try:
            for rank in parallel.ranks[1:]:
                self._followers.append(_Follower(job, rank))
            with self._watched("start"):
                self._own = job.join(parallel.ranks[0])
                for follower in self._followers:
                    follower.receive(START_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every rank but this one, which leaves the group."""
        import torch.distributed as dist

        followers, self._followers = self._followers, []
        self._failure = self._failure or "the group was closed"
        for follower in followers:
            follower.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Of the ranks that follow."""
        return [follower.process.pid for follower in self._followers]

    def allocate(self, blocks: int) -> None:
        self._call("allocate", blocks)

    def count_blocks(self, fraction: float) -> int:
        """Of engines: blocks that fit on every rank (EngineRunner.count_blocks)."""
        counts: list[int] = self._call("count_blocks", fraction)
        return min(counts)

    def step(self, inputs: Inputs) -> torch.Tensor:
        answers: list[torch.Tensor | None] = self._call("step", inputs)
        logits = answers[next(rank.index for rank in self.parallel.ranks if speaks(rank))]
        assert logits is not None  # the last stage has them
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._call("copy_blocks", pairs)

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """Pools are named by rank: two ranks of a tensor group have pools of one name."""
        answers: list[Blocks] = self._call("read_blocks", blocks)
        return {f"{rank}.{name}": pool for rank, pools in enumerate(answers) for name, pool in pools.items()}

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        parts: list[Blocks] = [{} for _ in self.parallel.ranks]
        for name, pool in content.items():
            rank, _, own = name.partition(".")
            parts[int(rank)][own] = pool
        self._call("write_blocks", blocks, by_rank=parts)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self._call("zero_blocks", blocks)

    def _call(self, name: str, *arguments: Any, by_rank: Sequence[Any] | None = None) -> list[Any]:
        """Has every rank do it; what each gives, by rank. `by_rank`: a last argument of each rank's own."""
        if self._failure is not None:
            raise RunnerError(f"{self._failure}, and the other ranks with it", hint=_BROKEN)
        own = [(*arguments, *([] if by_rank is None else [by_rank[rank.index]])) for rank in self.parallel.ranks]
        with self._watched(name):
            for follower in self._followers:
                follower.send(name, own[follower.rank.index])
            first = getattr(self._own, name)(*own[0])
            return [first, *(follower.receive(None) for follower in self._followers)]

    @contextlib.contextmanager
    def _watched(self, what: str) -> Any:
        """Whatever goes wrong on one rank is the end of the group. The rank that died is named, not the one that waits
        for it."""
        try:
            yield
        except Exception as error:
            gone = self._find_dead() or next(filter(None, (follower.explain() for follower in self._followers)), None)
            self._failure = gone or f"rank 0 failed ({what}): {type(error).__name__}: {error}"
            for follower in self._followers:
                follower.process.kill()
                follower.process.wait()
            raise RunnerError(self._failure, hint=_BROKEN) from error

    def _find_dead(self) -> str | None:
        """The rank that died. Those that lost it fail, say so and end with 0, perhaps before it is quite gone."""
        end = time.monotonic() + DYING_S
        while time.monotonic() < end:
            for follower in self._followers:
                if code := follower.process.poll():
                    return f"rank {follower.rank.index} ended with status {code}"
            time.sleep(0.02)
        return None


class _Follower:
    """The leader's end of a rank's process."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self.rank = rank
        here, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [_find_python(), "-m", "pipeline.runtime.rank_process", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = Connection(here.detach())
        self._said: str | None = None
        put(self._connection, (job, rank))

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        put(self._connection, (name, arguments))

    def receive(self, seconds: float | None) -> Any:
        """Its next answer. Raises RunnerError where it failed, died or does not answer."""
        if not self._connection.poll(seconds):
            raise RunnerError(f"rank {self.rank.index} has not answered after {seconds:g} s")
        try:
            self._said, result = take(self._connection)
        except (EOFError, OSError):
            raise RunnerError(f"rank {self.rank.index} is gone") from None
        if self._said is not None:
            raise RunnerError(self._said)
        return result

    def explain(self) -> str | None:
        """What it failed with; None of one that lives and works."""
        with contextlib.suppress(RunnerError, EOFError, OSError):
            while self._said is None and self._connection.poll(0.2):
                self._said, _ = take(self._connection)
        return None if self._said is None else f"rank {self.rank.index} failed: {self._said}"

    def close(self) -> None:
        self._connection.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _find_python() -> str:
    """An embedded interpreter (Triton's stub) is not one that runs modules."""
    own = Path(sys.prefix) / "bin" / "python3"
    return str(own) if own.exists() else sys.executable
