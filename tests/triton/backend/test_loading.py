"""Which runner serves a package."""

from __future__ import annotations

import pytest

from pipeline.errors import CompatibilityError
from pipeline.triton.backend import loading


@pytest.mark.parametrize(("sms", "kind"), [([], "interpreter"), ([90], "engine"), ([80, 90], "engine")])
def test_auto_asks_the_driver(sms: list[int], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch on a host with a GPU must not serve from the CPU unnoticed."""
    monkeypatch.setattr(loading, "list_device_sms", lambda: sms)
    assert loading.pick_runner("auto") == kind


@pytest.mark.parametrize("wanted", ["engine", "interpreter"])
def test_takes_what_is_asked_for(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "list_device_sms", lambda: pytest.fail("asked the driver"))
    assert loading.pick_runner(wanted) == wanted


def test_refuses_other_runners() -> None:
    with pytest.raises(CompatibilityError, match="parameter runner is 'gpu'"):
        loading.pick_runner("gpu")
