from __future__ import annotations

from typing import Any

import pytest

from pipeline.stages.change import explain_values

FILE = {"format": "auto", "key": None, "weight": None}
NAMES = [f"transformer.layers.{layer}.mlp.fc" for layer in range(20)]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (["int4", "int8"], ("int4", "int8"), []),  # as run.json gives it back
        ([{"a": [["x"]]}], ({"a": (("x",),)},), []),
        (["mlp"], ("mlp", "head"), ['x: ["mlp"] → ["mlp", "head"]']),
        ([FILE, FILE], [FILE, FILE | {"weight": 2}], ["x.1.weight: unset → 2"]),
        ([FILE] * 9, [FILE | {"key": "a"}] * 9, ["x.0.key: unset → a", "x.1.key: unset → a", "x: 7 more changed"]),
        ([], [{"key": None, "chat": True}], ['x: [] → [{"key": null, "chat": true}]']),
        ("awq", None, ["x: awq → unset"]),
        (False, True, ["x: false → true"]),
        (1e-4, 1.001, ["x: 0.0001 → 1.001"]),
    ],
)
def test_values_are_spelled_as_they_are_written(old: Any, new: Any, lines: list[str]) -> None:
    assert explain_values(old, new, "x") == lines


def test_of_a_long_value_the_part_that_differs_is_shown() -> None:
    (line,) = explain_values(NAMES, [*NAMES[:12], "lm_head", *NAMES[13:]], "exclude")
    before, after = line.removeprefix("exclude: ").split(" → ")
    assert "transformer.layers.12.mlp.fc" in before and "lm_head" in after
    assert all(text.startswith("…") and text.endswith("…") and len(text) == 60 for text in (before, after))
