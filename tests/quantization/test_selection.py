"""What may become INT4: groups, patterns, and that asking costs no heavy import."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import list_kinds
from pipeline.quantization import selection


@pytest.mark.parametrize(
    ("in_features", "wanted", "group"),
    [(256, 128, 128), (576, 128, 64), (96, 128, 32), (256, 64, 64), (256, 32, 32), (100, 128, None), (192, 128, 64)],
)
def test_pick_group(in_features: int, wanted: int, group: int | None) -> None:
    assert selection.pick_group((2, in_features), wanted) == group


def test_an_odd_number_of_outputs_has_no_group() -> None:
    assert selection.pick_group((3, 256), 128) is None


@pytest.mark.parametrize(
    "patterns", [(), ("b.*", "a.[01].*", "a.*"), ("*.mlp.fc",), ("*.mlp.fc.weight", "a.[0-1].*"), ("a",), ("A.*",)]
)
def test_patterns_are_the_shell_s_with_and_without_the_suffix(patterns: tuple[str, ...]) -> None:
    find = selection.find_pattern(patterns)
    for name in ("a.0.mlp.fc", "a.2.mlp.fc", "a.1.mlp.proj", "a", "b"):
        spelled = (name, f"{name}.weight")
        found = [i for i, pattern in enumerate(patterns) if any(fnmatchcase(each, pattern) for each in spelled)]
        assert find(name) == find(f"{name}.weight") == (found[0] if found else None)


RECIPE = selection.Rules(
    method="awq",
    include=("mlp", "experts"),
    exclude=("*.0.mlp.proj",),
    group_size=128,
    recipe=(
        selection.Override(pattern="*.0.*", method="rtn", group_size=64),
        selection.Override(pattern="*.mlp.fc", method="none"),
    ),
)


@pytest.mark.parametrize(
    ("name", "role", "decision"),
    [
        ("a.0.mlp.fc", "mlp", selection.Decision(method="rtn", group=64)),  # the first row that matches decides
        ("a.0.attention.dense", "attention_output", selection.Decision(method="rtn", group=64)),  # whatever its role
        ("a.0.mlp.router", "router", "role router is never quantized"),
        ("a.0.mlp.proj", "mlp", "excluded by *.0.mlp.proj"),
        ("a.1.mlp.fc", "mlp", "left as it is by the recipe's *.mlp.fc"),
        ("a.1.mlp.proj", "mlp", selection.Decision(method="awq", group=128)),
        ("a.1.attention.dense", "attention_output", "role attention_output is not included"),
    ],
)
def test_a_recipe(name: str, role: str, decision: selection.Decision | str) -> None:
    assert RECIPE.decide(f"{name}.weight", role, (4, 256)) == decision
    assert RECIPE.methods == ("awq", "rtn") and RECIPE.measures


def test_counting_a_kind_is_deciding_on_each_of_its_linears(llama_path: Path) -> None:
    architecture = CheckpointFolder.open(llama_path).architecture
    for rules in (RECIPE, replace(RECIPE, recipe=(), exclude=()), selection.NOTHING):
        for kind in list_kinds(architecture):
            shape = kind.first.target_shape
            if len(shape) == 2:
                each = Counter(rules.decide(name, kind.first.role, shape) for name in kind.names())
                assert rules.count(kind) == each
                wished = sum(count for _, count in rules.wishes(kind).values())
                assert wished >= sum(n for decision, n in each.items() if isinstance(decision, selection.Decision))


def test_asking_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, pipeline.quantization.selection; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "pipeline.quantization.selection" in loaded
    assert not {"torch", "numpy", "pydantic"} & set(loaded)
