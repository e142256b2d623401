"""Processes that are the ranks of parallel models: started once, asked many times.

They are forked from a server that has torch already, and joined by gloo as one world; a model of fewer ranks runs on
the first of them.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from pipeline.interpreter.ranks import join_ranks
from pipeline.network.readback import Program
from pipeline.sharding import Parallel, Rank
from tests.network.serving import serve

SECONDS = 120  # without an answer: a rank that waits for one that is gone


class Ranks:
    """A context: `with Ranks(4, folder) as ranks`."""

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connections: list[Connection] = []
        self._processes = []
        for index in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_answer, args=(Rank(Parallel(count), index), folder / "ranks", there))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(5)
            process.kill()

    def serve(
        self, parallel: Parallel, programs: Sequence[Program], **options: Any
    ) -> list[list[dict[str, torch.Tensor]]]:
        """What `serving.serve` gives on each rank, with that rank's program."""
        for rank, program in zip(parallel.ranks, programs, strict=True):
            self._connections[rank.index].send((program, rank, options))
        answers = []
        for connection in self._connections[: parallel.world]:
            if not connection.poll(SECONDS):
                raise TimeoutError("a rank does not answer")
            answers.append(connection.recv())
        failed = next((answer for answer in answers if isinstance(answer, str)), None)
        if failed is not None:
            raise RuntimeError(failed)
        return answers


def _answer(rank: Rank, path: Path, connection: Connection) -> None:
    torch.set_num_threads(1)
    join_ranks(rank, f"file://{path}")
    while True:
        try:
            program, place, options = connection.recv()
        except EOFError:
            return
        try:
            connection.send(serve(program, rank=place, **options))
        except Exception:
            connection.send(traceback.format_exc())
