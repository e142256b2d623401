"""Work that ends in several ways, for a process of its own: it imports nothing that takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def count_to(number: int, then: str) -> Iterator[int]:
    yield from range(number)
    if then == "raise":
        raise ValueError("all\nof it")
    if then == "die":
        os._exit(7)
    if then == "hang":
        time.sleep(60)
