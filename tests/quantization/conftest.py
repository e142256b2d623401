from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """tokenizer.json in the test's own folder."""
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"
