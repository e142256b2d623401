"""Checkpoints in every form under one set of names: the view of a hub folder equals what conversion writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError, CompatibilityError, ConfigError
from pipeline.evaluation.hub_view import HubView
from pipeline.evaluation.subject import check_alike, open_subject, open_subjects
from pipeline.workspace import FolderWorkspace
from tests import fixtures

KINDS = {
    "llama": lambda path: fixtures.llama(path),
    "qwen2": lambda path: fixtures.qwen2(path),
    "deepseek_v2": lambda path: fixtures.deepseek_v2(path, num_hidden_layers=2),
    "deepseek_v3 in FP8": lambda path: fixtures.deepseek_v3(path, fp8=True, num_hidden_layers=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hub_folder_reads_as_its_conversion_does(kind: str, tmp_path: Path) -> None:
    source = CheckpointFolder.open(KINDS[kind](tmp_path / "hf"))
    convert_checkpoint(source, FolderWorkspace(tmp_path / "engine"), dtype=None, overflow="refuse")
    engine, view = CheckpointFolder.open(tmp_path / "engine"), HubView(source)
    assert {i.name: (i.dtype, i.shape) for i in view.tensors.values()} == {
        i.name: (i.dtype, i.shape) for i in engine.tensors.values()
    }
    for name in engine.tensors:
        assert bytes(view.read(name).data) == bytes(engine.read(name).data), name
        view.release(name)
    assert view.dtype == engine.architecture.dtype


def test_several_types_are_widened_to_one_that_holds_them_all(tmp_path: Path) -> None:
    def widen(tensors: fixtures.Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-6

    source = CheckpointFolder.open(fixtures.llama(tmp_path / "hf", edit=widen))
    view = HubView(source)
    assert view.dtype == "float32"
    assert {info.dtype for info in view.tensors.values()} == {"F32"}
    stored = source.read("model.layers.0.self_attn.o_proj.weight").to_torch()
    assert torch.equal(view.read("transformer.layers.0.attention.dense.weight").to_torch(), stored.float())


def test_a_run_folder_stands_for_what_its_stages_made(tmp_path: Path) -> None:
    run = tmp_path / "out"
    run.mkdir()
    (run / "run.json").write_text("{}")
    for stage in ("convert", "quantize"):
        fixtures.llama(run / stage)
    subjects = open_subjects([run])
    assert [subject.label for subject in subjects] == [str(run / "convert"), str(run / "quantize")]


def test_one_checkpoint_and_two_models_are_refused(tmp_path: Path) -> None:
    one, other = fixtures.llama(tmp_path / "one"), fixtures.llama(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="nothing to compare"):
        open_subjects([one])
    with pytest.raises(CompatibilityError, match=r"other is of another model than .*one: num_layers 2, not 3"):
        check_alike([open_subject(one), open_subject(other)])
    with pytest.raises(CheckpointError, match="no such folder"):
        open_subjects([one, tmp_path / "absent"])


def test_a_name_that_nothing_gives_is_refused(tmp_path: Path) -> None:
    view = HubView(CheckpointFolder.open(fixtures.llama(tmp_path / "hf")))
    with pytest.raises(CheckpointError, match=r"no tensor gives transformer\.absent"):
        view.read("transformer.absent")
