"""Kinds against the layout, expanded in full."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import layout_for, list_kinds, matches_plainly
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.errors import CheckpointError
from tests import fixtures


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


@pytest.mark.parametrize("fixture", ["llama_path", "deepseek_v2_path", "deepseek_v2_lite_path"])
def test_a_plain_match_is_what_the_layout_finds(fixture: str, request: pytest.FixtureRequest) -> None:
    source = CheckpointFolder.open(request.getfixturevalue(fixture))
    layout_for(source.architecture).match(source.tensors, "it")
    assert matches_plainly(source.architecture, source.tensors)
    for name, info in source.tensors.items():
        without = {other: each for other, each in source.tensors.items() if other != name}
        assert not matches_plainly(source.architecture, without)
        reshaped = {**source.tensors, name: info._replace(shape=(*info.shape, 1))}
        assert not matches_plainly(source.architecture, reshaped)
        retyped = {**source.tensors, name: info._replace(dtype="F8_E4M3")}
        assert not matches_plainly(source.architecture, retyped)
    assert not matches_plainly(source.architecture, {**source.tensors, "more": TensorInfo("more", "F32", (1,))})


@pytest.mark.parametrize("mtp", [True, False])
def test_a_plain_match_of_fp8_blocks_and_mtp(tmp_path: Path, mtp: bool) -> None:
    source = CheckpointFolder.open(fixtures.deepseek_v3(tmp_path / "v3", fp8=True, mtp=mtp))
    roles = ("experts", "mlp", "attention_output")
    assert matches_plainly(source.architecture, source.tensors, fp8_roles=roles)
    for name, info in source.tensors.items():
        dtype = "BF16" if info.dtype != "BF16" else "F8_E4M3"
        assert not matches_plainly(
            source.architecture, {**source.tensors, name: info._replace(dtype=dtype)}, fp8_roles=roles
        ) or name.endswith(("bias", "norm.weight"))
        without = {other: each for other, each in source.tensors.items() if other != name}
        assert not matches_plainly(source.architecture, without, fp8_roles=roles)
    plain = CheckpointFolder.open(fixtures.deepseek_v3(tmp_path / "plain", mtp=mtp))
    assert matches_plainly(plain.architecture, plain.tensors)
    assert not matches_plainly(plain.architecture, plain.tensors, fp8_roles=roles)


def test_a_config_of_millions_of_tensors_is_answered_at_once(tmp_path: Path) -> None:
    """A hostile config.json: 1000 layers of 4096 experts, twelve million tensors that no shard has."""
    source = CheckpointFolder.open(fixtures.deepseek_v2(tmp_path))
    experts = replace(source.architecture.experts, num_routed=4096, n_group=1, topk_group=1)
    absurd = replace(source.architecture, num_layers=1000, experts=experts)
    tracemalloc.start()
    assert not matches_plainly(absurd, source.tensors)
    with pytest.raises(CheckpointError, match=r"has shape|is missing"):
        layout_for(absurd).match(source.tensors, "it")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
