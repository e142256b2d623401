"""The canaries that fly while a server serves; the rest is tested with a package, end to end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.triton import canary
from pipeline.triton.addresses import Addresses
from pipeline.triton.canary import Canaries
from pipeline.triton.errors import ServerError


def look(canaries: Canaries) -> str | None:
    """Sends one, and waits until it is down."""
    assert canaries.look(Addresses(), every=0.0, timeout=1.0) is None
    end = time.monotonic() + 10
    while canaries._result.empty() and time.monotonic() < end:
        time.sleep(0.01)
    return canaries.look(Addresses(), every=0.0, timeout=1.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [(ServerError("no answer", hint="h"), "no answer"), (ValueError("odd"), "odd"), (KeyError(), "KeyError()")],
)
def test_one_that_fails_is_told_and_the_next_flies(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    """Whatever it failed of."""
    errors: list[Any] = [error, None, error]

    def send(addresses: Addresses, timeout: float) -> float:
        if (raised := errors.pop(0)) is not None:
            raise raised
        return 1.0

    monkeypatch.setattr(canary, "send_canary", send)
    canaries = Canaries()
    assert [look(canaries) for _ in range(3)] == [told, "", told]
