"""Work that ends in several ways, for a process of its own: it imports nothing that takes long."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.kernel_rows import Row


def count_to(number: int, then: str) -> Iterator[int]:
    yield from range(number)
    if then == "raise":
        raise ValueError("all\nof it")
    if then == "die":
        os._exit(7)
    if then == "hang":
        time.sleep(60)


def write_and_hang(amount: int) -> Iterator[str]:
    """Gives the place of a file that nothing but its own process would remove."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "engine"
        place.write_bytes(bytes(amount))
        yield str(place)
        time.sleep(60)


def lose_the_first(rows: list[tuple[Row, object]], *_: object) -> Iterator[Row]:
    """As if decode 32 brought the GPU down, and prefill its process."""
    for row, _operation in rows:
        if row.step == "prefill":
            os._exit(1)
        yield replace(row, error=0.5) if row.step != "decode 32" else replace(row, failure="illegal access")
        if row.step == "decode 32":
            return
