"""What tests of stages share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_digest_cache():
    """An Executor turns the cache on for the process; no test leaves it to the next."""
    from pipeline.digest import set_digest_cache

    yield
    set_digest_cache(None)
