"""The verb alone; what it measures is tested in tests/quantization/test_sensitivity.py."""

from __future__ import annotations

import pytest

from pipeline.errors import StoreError


def test_a_store_that_cannot_be_written_is_its_trouble(workplace, invoke):
    (workplace / "out").mkdir()
    (workplace / "out" / "store").touch()
    with pytest.raises(StoreError, match=r"^out/store is a file where a folder should be") as caught:
        invoke("sensitivity", "small")
    assert "set `output:`" in caught.value.hint
