"""One process of Triton's interpreter for all tests of a run: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugins.simulator import Simulator


@pytest.fixture(scope="session")
def simulator() -> Iterator[Simulator]:
    with Simulator() as running:
        yield running
