"""Plugins are the default where their kernels have passed, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load_config
from plugins import passed

NATIVE = dict.fromkeys(("rope_paged_kv", "paged_attention", "moe_experts", "moe_all_to_all"), "native")
Lower = Callable[..., dict[str, str]]
PASSED = ("rope_paged_kv", "paged_attention", "moe_all_to_all")


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A100."""
    sources = [passed.digest_source(f"plugins.{name}.kernel") for name in PASSED]
    rows = [{"source": source, "sm": 80, "device": "A100", "date": "2026-12-01"} for source in sources]
    (tmp_path / "passed.json").write_text(json.dumps({"runs": rows}))
    monkeypatch.setattr(passed, "TABLE", tmp_path / "passed.json")


@pytest.fixture
def lower(tmp_path: Path) -> Lower:
    def load(target: dict[str, Any], lowering: dict[str, str] | None = None) -> dict[str, str]:
        stages = {} if lowering is None else {"stages": {"build": {"lowering": lowering}}}
        (tmp_path / "a.yaml").write_text(yaml.safe_dump({"model": {"path": "m"}, "target": target, **stages}))
        return load_config(tmp_path / "a.yaml").stages.build.lowering.model_dump()

    return load


def test_the_default_is_what_has_passed_on_this_sm(lower: Lower) -> None:
    attention = {"rope_paged_kv": "plugin", "paged_attention": "plugin"}
    assert lower({"gpu": "A100"}) == NATIVE | attention
    assert lower({"gpu": "A10"}) == NATIVE | attention  # SM86 runs the PTX for SM80
    assert lower({"gpu": "L4"}) == NATIVE
    assert lower({"gpu": "A100", "backend": "tensorrt_llm"}) == NATIVE
    spread = {"gpu": "A100", "parallel": {"tensor": 2, "expert": 2}}
    assert lower(spread) == NATIVE | attention | {"moe_all_to_all": "plugin"}


def test_what_a_config_says_counts(lower: Lower) -> None:
    asked = {"paged_attention": "native", "moe_experts": "plugin"}
    assert lower({"gpu": "A100"}, asked) == NATIVE | {"rope_paged_kv": "plugin"} | asked
    assert lower({"gpu": "L4"}, asked) == NATIVE | asked


def test_an_edited_kernel_has_passed_nowhere(lower: Lower, tmp_path: Path) -> None:
    runs = json.loads((tmp_path / "passed.json").read_text())["runs"]
    runs[0]["source"] = "blake3:before"
    (tmp_path / "passed.json").write_text(json.dumps({"runs": runs}))
    assert lower({"gpu": "A100"}) == NATIVE | {"paged_attention": "plugin"}


def test_where_nothing_has_passed_all_is_native(lower: Lower, tmp_path: Path) -> None:
    (tmp_path / "passed.json").write_text('{"runs": []}')
    assert lower({"gpu": "A100"}) == NATIVE
