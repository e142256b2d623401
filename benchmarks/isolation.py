"""Work in a process of its own, result by result: what crashes, hangs or loses the GPU's context ends that process and
nothing else."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

LONGEST_WORDS = 300  # of an error's
RESULT, ERROR, END = "result", "error", "end"


class LostError(Exception):
    """Why no further result comes."""


def stream(
    work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], *, patience: float, until: float
) -> Generator[Any]:
    """What `work(*arguments)` yields, as it comes; all of it can be pickled, and `work` can be imported. Raises
    LostError where that raises, where its process dies, where nothing comes for `patience` seconds, and at `until`, of
    time.monotonic(). Its temporary files go with it, also where it cannot remove them any more."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield from _stream((work, arguments, folder), patience, until)


def _stream(job: tuple[Any, ...], patience: float, until: float) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit CUDA's state, which is of no use in it
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_all, args=(sending, *job), daemon=True)
    process.start()
    sending.close()
    try:
        while True:
            wait = max(0.0, min(patience, until - time.monotonic()))
            if not receiving.poll(wait):
                raise LostError(f"nothing came for {wait:.0f} s")
            try:
                kind, value = receiving.recv()
            except EOFError:
                process.join()
                raise LostError(f"its process died (exit code {process.exitcode})") from None
            if kind == ERROR:
                raise LostError(value)
            if kind == END:
                return
            yield value
    finally:
        process.kill()
        process.join()


def describe_error(error: BaseException) -> str:
    """One line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_WORDS]


def _send_all(sending: Connection, work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], folder: str) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        for result in work(*arguments):
            sending.send((RESULT, result))
    except Exception as error:
        sending.send((ERROR, describe_error(error)))
    else:
        sending.send((END, None))
