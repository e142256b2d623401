"""How long a test may take: slow ones have a limit of their own, and none is taken from a test."""

from __future__ import annotations

import pytest

from tests.conftest import SLOW_S, pytest_collection_modifyitems


class Item:
    """As much of pytest's as the hook looks at."""

    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark.mark for mark in reversed(self.marks) if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


def test_limits() -> None:
    quick, slow, own = Item(), Item(pytest.mark.slow), Item(pytest.mark.slow, pytest.mark.timeout(9))
    pytest_collection_modifyitems([quick, slow, own])  # type: ignore[list-item]
    found = [item.get_closest_marker("timeout") for item in (quick, slow, own)]
    assert [mark and mark.args for mark in found] == [None, (SLOW_S,), (9,)]
