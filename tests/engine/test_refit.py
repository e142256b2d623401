"""Engines built without weights, and everything of their refit that needs no GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engine import tensorrt
from pipeline.engine.description import load_description
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.refit import check_refit, refit_engine
from pipeline.engine.refit_list import load_refit_list
from pipeline.errors import BuildError, CheckpointError
from tests.engine.checkpoints import TINY_LLAMA, TINY_V2, write_engine_checkpoint
from tests.engine.conftest import LLAMA_INT4, V2_INT4, Built, build
from tests.engine.failing import SMALL

ONE_LAYER = TINY_LLAMA | {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """One checkpoint, built with its weights for SM80 and without for SM86."""
    folder = tmp_path_factory.mktemp("stripped")
    full = build(folder, ONE_LAYER, LLAMA_INT4, SMALL)
    return full, build(folder, ONE_LAYER, LLAMA_INT4, SMALL, sm=86, weights="stripped", weight_streaming=True)


def test_a_stripped_engine_is_the_same_network_compiled_alike(pair: tuple[Built, Built]) -> None:
    full, stripped = pair
    _check_alike(full, stripped)
    described = load_description(stripped.path.parent)
    assert described == stripped.description
    assert (described.weights, described.weight_streaming) == ("stripped", True)
    assert (full.description.weights, full.description.weight_streaming) == ("full", False)
    assert sorted(p.name for p in stripped.path.parent.iterdir()) == ["engine.json", "model.engine", "refit.json"]


def _check_alike(full: Built, stripped: Built) -> None:
    assert stripped.description.network_digest == full.description.network_digest
    wanted = load_refit_list(stripped.path.parent)
    assert wanted.network_digest == full.description.network_digest
    engines = inspect_engine(full.path), inspect_engine(stripped.path)
    for before, after in zip(engines[0].profiles, engines[1].profiles, strict=True):
        assert before.workspace_bytes == after.workspace_bytes
        assert (before.graph.kernels, before.graph.fusions) == (after.graph.kernels, after.graph.fusions)
    # The names are in the engine, for the refitter; the values are not.
    data = stripped.path.read_bytes()
    for constant in wanted.constants:
        assert constant.name.encode() in data, constant.name
    embedding = (full.checkpoint / "model.safetensors").read_bytes()[-4096:]
    assert embedding in full.path.read_bytes() and embedding not in data
    # Full engines lay weights out anew, some padded.
    assert stripped.description.weights_bytes == pytest.approx(full.description.weights_bytes, rel=0.1)


@pytest.mark.slow
def test_experts_and_latent_attention_too(tmp_path: Path) -> None:
    full = build(tmp_path, TINY_V2, V2_INT4, SMALL)
    stripped = build(tmp_path, TINY_V2, V2_INT4, SMALL, sm=86, weights="stripped")
    _check_alike(full, stripped)
    assert len(check_refit(stripped.path.parent, stripped.checkpoint).constants) > 40


def test_the_checkpoint_can_be_checked_without_a_gpu(pair: tuple[Built, Built], tmp_path: Path) -> None:
    _, stripped = pair
    checked = check_refit(stripped.path.parent, stripped.checkpoint)
    assert checked == load_refit_list(stripped.path.parent)
    other = write_engine_checkpoint(tmp_path / "other", ONE_LAYER, int4=LLAMA_INT4, group=64, seed=5)
    with pytest.raises(CheckpointError, match="is not the one that the engine was built for"):
        check_refit(stripped.path.parent, other)


def test_only_on_the_gpu_that_the_engine_is_for(
    pair: tuple[Built, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stripped = pair
    for present, found in (([], "none"), ([90, 90, 80], "SM80, SM90")):
        monkeypatch.setattr(tensorrt, "list_device_sms", lambda present=present: present)
        with pytest.raises(BuildError, match=f"it is for SM86, this machine has: {found}") as caught:
            refit_engine(stripped.path.parent, stripped.checkpoint, tmp_path / "out")
        assert "--check" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_refusals_before_any_weight_is_read(pair: tuple[Built, Built], tmp_path: Path) -> None:
    full, stripped = pair
    output = tmp_path / "out"
    with pytest.raises(BuildError, match="has its weights"):
        refit_engine(full.path.parent, full.checkpoint, output)
    with pytest.raises(BuildError, match="exists and is not empty"):
        refit_engine(stripped.path.parent, stripped.checkpoint, stripped.path.parent)
    copy = Path(shutil.copytree(stripped.path.parent, tmp_path / "copy"))
    (copy / "model.engine").unlink()
    with pytest.raises(BuildError, match=r"model\.engine is missing"):
        refit_engine(copy, stripped.checkpoint, output)
    (copy / "engine.json").write_text(replace(stripped.description, network_digest="blake3:0").to_json())
    with pytest.raises(BuildError, match="are of two networks"):
        refit_engine(copy, stripped.checkpoint, output)
    (copy / "refit.json").unlink()
    with pytest.raises(BuildError, match=r"refit\.json: No such file"):
        refit_engine(copy, stripped.checkpoint, output)


def test_an_engine_that_the_runtime_cannot_load(
    pair: tuple[Built, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it goes without a GPU: TensorRT itself refuses, and nothing of an engine is left."""
    _, stripped = pair
    monkeypatch.setattr(tensorrt, "list_device_sms", lambda: [86])
    with pytest.raises(BuildError, match="cannot be loaded on this GPU"):
        refit_engine(stripped.path.parent, stripped.checkpoint, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_building_with_weights_again_removes_the_list(pair: tuple[Built, Built], tmp_path: Path) -> None:
    full, _ = pair
    shutil.copytree(full.checkpoint, tmp_path / "checkpoint")
    (tmp_path / "sm80").mkdir()
    (tmp_path / "sm80" / "refit.json").write_text("{}")
    built = build(tmp_path, ONE_LAYER, LLAMA_INT4, SMALL, weight_streaming=True)
    assert load_description(built.path.parent).weight_streaming
    assert not (built.path.parent / "refit.json").exists()
    assert json.loads((built.path.parent / "engine.json").read_text())["weights"] == "full"
