"""A package's model in this process: the executor without a server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.packages import MODEL, read_parameters
from pipeline.runtime.executor import Executor
from pipeline.runtime.request import Request
from pipeline.triton.backend.loading import load_model
from pipeline.triton.package import find_package


@contextlib.contextmanager
def executing(package: Path) -> Iterator[Executor]:
    """The executor over the package's network, in this process."""
    repository = find_package(package).repository
    loaded = load_model(repository / MODEL, read_parameters(repository))
    executor = Executor(loaded.runner, loaded.limits, vocab_size=loaded.vocab_size)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown(drain=False)


def time_first(executor: Executor, prompt: Sequence[int]) -> float:
    """Seconds until a prompt's first token."""
    came = threading.Event()
    began = time.monotonic()
    executor.submit(Request(input_ids=tuple(prompt), max_tokens=1, streaming=True), lambda update: came.set())
    came.wait(120)
    return time.monotonic() - began
