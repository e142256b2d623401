"""Plugins are the default where their kernels have passed, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load_config
from tests.passes import LOWERINGS, fill_table

NATIVE = dict.fromkeys(LOWERINGS, "native")
Lower = Callable[..., dict[str, str]]
PASSED = ("rope_paged_kv", "paged_attention", "moe_all_to_all")


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_table(tmp_path / "passed.json", monkeypatch, lowerings=PASSED)


@pytest.fixture
def lower(tmp_path: Path) -> Lower:
    def load(
        target: dict[str, Any], lowering: dict[str, str] | None = None, quantize: dict[str, Any] | None = None
    ) -> dict[str, str]:
        stages = {} if lowering is None else {"build": {"lowering": lowering}}
        config = {"model": {"path": "m"}, "target": target, "stages": {**stages, "quantize": quantize or {}}}
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
        return load_config(tmp_path / "a.yaml").stages.build.lowering.model_dump()

    return load


def test_the_default_is_what_has_passed_on_this_sm(lower: Lower) -> None:
    attention = {"rope_paged_kv": "plugin", "paged_attention": "plugin"}
    assert lower({"gpu": "A100"}) == NATIVE | attention
    assert lower({"gpu": "A10"}) == NATIVE | attention  # SM86 runs the PTX for SM80
    assert lower({"gpu": "L4"}) == NATIVE  # has PTX of its own
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


EXPERTS = NATIVE | {"moe_experts": "plugin"}


@pytest.mark.parametrize(
    ("quantize", "chosen"),
    [
        ({"method": "awq"}, EXPERTS),
        ({"method": "none"}, EXPERTS),
        ({"method": "int8"}, NATIVE),
        ({"method": "int8", "include": ["attention_output"]}, EXPERTS),
        ({"recipe": {"rows": [{"pattern": "*.layers.3.mlp.experts.*", "method": "int8"}]}}, NATIVE),
        ({"recipe": {"rows": [{"pattern": "*.attention.dense", "method": "int8"}]}}, EXPERTS),
        ({"recipe": {"auto": True}, "budget": {"bits_per_weight": 5}}, NATIVE),  # it may choose INT8
        ({"recipe": {"auto": True}, "sensitivity": {"formats": ["int4"]}, "budget": {"bits_per_weight": 5}}, EXPERTS),
    ],
)
def test_experts_without_a_kernel_stay_native(
    quantize: dict[str, Any], chosen: dict[str, str], lower: Lower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_table(tmp_path / "passed.json", monkeypatch, lowerings=("moe_experts",))
    assert lower({"gpu": "A100"}, quantize=quantize) == chosen


def test_ptx_that_is_tied_to_one_gpu_says_nothing_of_later_ones(
    lower: Lower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"gpu": "B200", "backend": "tensorrt"}
    for sm, chosen in ((90, NATIVE), (89, NATIVE | {"rope_paged_kv": "plugin"})):
        fill_table(tmp_path / "passed.json", monkeypatch, sm=sm, lowerings=("rope_paged_kv",))
        assert lower(target) == chosen
