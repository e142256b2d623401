"""How many threads torch uses, for a while."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def bounded_threads() -> AbstractContextManager[None]:
    """No more than processors that this process may use: torch counts the machine's, a container has fewer."""
    return _threads(max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)))))


def single_threaded() -> AbstractContextManager[None]:
    """A factorization's last bits depend on the number of threads (a matrix product's do not), and equal runs are to
    give equal bytes."""
    return _threads(1)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
