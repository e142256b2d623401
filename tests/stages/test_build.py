"""What decides an engine beside its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.stages.build import STAGE

ROOT = Path(__file__).parents[2]


def test_an_edited_plugin_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is in it."""
    monkeypatch.chdir(ROOT)
    plugins, native = load_config("a100-int4-plugins"), load_config("a100-int4")
    before, kept = STAGE.parameters(plugins), STAGE.parameters(native)
    assert before["plugins"].keys() == {"rope_paged_kv", "paged_attention", "moe_experts"} and kept["plugins"] == {}
    monkeypatch.setattr("plugins.passed.digest_plugin", lambda name: f"edited {name}")
    assert STAGE.parameters(plugins) != before
    assert STAGE.parameters(native) == kept
