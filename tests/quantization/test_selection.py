"""What may become INT4: groups, patterns, and that asking costs no heavy import."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

from pipeline.quantization import methods, selection


@pytest.mark.parametrize(
    ("in_features", "wanted", "group"),
    [(256, 128, 128), (576, 128, 64), (96, 128, 32), (256, 64, 64), (256, 32, 32), (100, 128, None), (192, 128, 64)],
)
def test_pick_group(in_features: int, wanted: int, group: int | None) -> None:
    assert selection.pick_group((2, in_features), wanted) == group


def test_an_odd_number_of_outputs_has_no_group() -> None:
    assert selection.pick_group((3, 256), 128) is None


@pytest.mark.parametrize("patterns", [(), ("*.mlp.fc",), ("*.mlp.fc.weight", "a.[0-1].*"), ("a",), ("A.*",)])
def test_patterns_are_the_shell_s_with_and_without_the_suffix(patterns: tuple[str, ...]) -> None:
    excludes = selection.compile_patterns(patterns)
    for name in ("a.0.mlp.fc.weight", "a.2.mlp.fc.weight", "a.1.mlp.proj.weight", "a.weight", "b.weight"):
        spelled = (name, name.removesuffix(".weight"))
        assert bool(excludes(name)) == any(fnmatchcase(each, pattern) for each in spelled for pattern in patterns)


def test_every_method_has_its_row_in_both_tables() -> None:
    assert methods.METHODS.keys() == selection.METHODS.keys()


def test_asking_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, pipeline.quantization.selection; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "pipeline.quantization.selection" in loaded
    assert not {"torch", "numpy", "pydantic"} & set(loaded)
