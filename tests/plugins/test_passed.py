"""What is said of kernels: no run is claimed that is not recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugins import passed
from plugins.passed import TABLE, digest_plugin, find_run
from tests.plugins.test_rope_paged_kv import HEADS


def test_a_run_counts_for_its_source_and_sm(tmp_path: Path) -> None:
    (kernel,) = HEADS.kernels()
    run = {"source": digest_plugin(kernel.plugin), "sm": 90, "device": "NVIDIA H200", "date": "2026-12-01"}
    table = tmp_path / "passed.json"
    table.write_text(json.dumps({"runs": [run, {**run, "source": "blake3:other", "sm": 80}]}))
    assert find_run(kernel, 90, table) == "NVIDIA H200, 2026-12-01"
    assert find_run(kernel, 80, table) is None


def test_the_committed_table_can_be_read() -> None:
    for run in json.loads(TABLE.read_text(encoding="utf-8"))["runs"]:
        assert run.keys() == {"source", "sm", "device", "date"}


def test_an_edited_plugin_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it goes into an engine; the reference does not."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name in ("kernel", "sizes", "reference"):
        (folder / f"{name}.py").write_text(name)
    monkeypatch.setattr(passed, "__file__", str(tmp_path / "passed.py"))
    digests = [passed.digest_plugin.__wrapped__("toy")]
    for name in ("reference", "sizes", "kernel"):
        (folder / f"{name}.py").write_text("edited")
        digests.append(passed.digest_plugin.__wrapped__("toy"))
    assert digests[0] == digests[1] and len(set(digests)) == 3
