"""Kinds against the layout, expanded in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layouts import layout_for, list_kinds


@pytest.mark.parametrize("fixture", ["llama_path", "deepseek_v2_path", "deepseek_v2_lite_path"])
def test_kinds_stand_for_every_tensor_once(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    architecture = parse_architecture(json.loads((path / "config.json").read_text()))
    mappings = {mapping.target: mapping for mapping in layout_for(architecture).mappings()}
    named: list[str] = []
    for kind in list_kinds(architecture):
        names = list(kind.names())
        assert len(names) == kind.count
        assert names[0] == kind.first.target
        for name in names:
            mapping = mappings[name]
            assert (mapping.role, mapping.target_shape) == (kind.first.role, kind.first.target_shape)
        named += names
    assert sorted(named) == sorted(mappings)
