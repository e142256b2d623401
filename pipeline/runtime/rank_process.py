"""A rank of a parallel model, in a process of its own: `python -m pipeline.runtime.rank_process DESCRIPTOR`.

Started by rank_group.py, which leads: it does what its leader says, and ends with it. Every rank runs every step, in
the same order; what they exchange within one goes past the leader.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pipeline.sharding import Parallel, Rank

if TYPE_CHECKING:
    from pipeline.runtime.runner import RankRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a group is told. address: where they meet, as torch.distributed takes it. maker: "module:name"
    of a function of a rank and `arguments` that gives its runner. threads: of each rank."""

    parallel: Parallel
    address: str
    maker: str
    arguments: Mapping[str, Any]
    threads: int

    def join(self, rank: Rank) -> RankRunner:
        """Makes this process that rank, and waits for all others."""
        import torch

        from pipeline.interpreter.ranks import join_ranks

        torch.set_num_threads(self.threads)
        join_ranks(rank, self.address)
        module, _, name = self.maker.partition(":")
        make: Callable[..., RankRunner] = getattr(importlib.import_module(module), name)
        return make(rank, **self.arguments)


def speaks(rank: Rank) -> bool:
    """Whether its logits are the ones that are read: all ranks of the last stage have the same."""
    return rank.pipeline == rank.parallel.pipeline - 1 and rank.tensor == 0


def put(connection: Connection, value: Any) -> None:
    """By value: the connection's own way is to share a tensor's memory, which takes a server of its own."""
    connection.send_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def take(connection: Connection) -> Any:
    """What the other end put; both are processes of one user's, started by the leader. Raises EOFError once it is
    gone."""
    return pickle.loads(connection.recv_bytes())


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        job, rank = take(connection)
        _serve(connection, job, rank)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the leader has gone


def _serve(connection: Connection, job: Job, rank: Rank) -> None:
    """Answers (None or what went wrong, result). A rank that failed is of no use: the others have gone on."""
    try:
        runner = job.join(rank)
        put(connection, (None, None))
        while True:
            name, arguments = take(connection)
            result = getattr(runner, name)(*arguments)
            put(connection, (None, result if name != "step" or speaks(rank) else None))
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        put(connection, (f"{type(error).__name__}: {error}", None))


if __name__ == "__main__":
    main()
