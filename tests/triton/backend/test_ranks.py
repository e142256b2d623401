"""What a rank's process loads: its own engine, on its own GPU, joined to the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipeline.runtime.engine_runner
import plugins.nccl
from pipeline.engine.description import EngineDescription
from pipeline.engine.rank_engines import build_ranks
from pipeline.errors import BuildError, CompatibilityError, PackageError, TrtseekError
from pipeline.network.spec import NetworkSpec
from pipeline.sharding import Parallel, Rank
from pipeline.triton.backend.ranks import load_rank_engine
from pipeline.workspace import FolderWorkspace
from tests.engine.test_rank_engines import Builder

PARALLEL = Parallel(tensor=4, expert=2)
COMMUNICATOR = 77


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    build_ranks(PARALLEL, NetworkSpec(dtype="float16", max_seq_len=256), FolderWorkspace(folder), Builder())
    return folder


class Gpus:
    """Four of them, and what was done, in order. A runner is its arguments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[Any, ...]] = []
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "set_device", lambda index: self.done.append(("set_device", index)))
        patch.setattr(plugins.nccl, "find_group", self.find_group)
        patch.setattr(pipeline.runtime.engine_runner, "EngineRunner", self.run)

    def find_group(self, first: int, ranks: int) -> SimpleNamespace:
        self.done.append(("find_group", first, ranks))
        return SimpleNamespace(handle=SimpleNamespace(value=COMMUNICATOR))

    def run(self, engine: Path, description: EngineDescription, **options: Any) -> Any:
        return engine, description, options


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize("index", range(4))
def test_a_rank_runs_its_own_engine_on_its_own_gpu(index: int, engines: Path, gpus: Gpus) -> None:
    rank = Rank(PARALLEL, index)
    loaded: Any = load_rank_engine(rank, engine=str(engines), weights=0.5)
    engine, description, options = loaded
    assert engine == engines / f"rank{index}/model.engine" and description.spec.rank == rank
    assert options == {"weights_fraction": 0.5, "communicator": COMMUNICATOR}
    # NCCL takes the GPU that is current: the rank's own, by then.
    assert gpus.done == [("set_device", index), ("find_group", 0, 4)]


def refuse(rank: Rank, folder: Path) -> TrtseekError:
    with pytest.raises(TrtseekError) as caught:
        load_rank_engine(rank, engine=str(folder), weights=1.0)
    return caught.value


def test_another_engine_in_its_place_is_refused(tmp_path: Path, gpus: Gpus) -> None:
    build_ranks(PARALLEL, NetworkSpec(dtype="float16", max_seq_len=256), FolderWorkspace(tmp_path), Builder())
    (tmp_path / "rank2/model.engine").write_bytes(b"engine of 1")
    assert isinstance(load_rank_engine(Rank(PARALLEL, 1), engine=str(tmp_path), weights=1.0), tuple)
    error = refuse(Rank(PARALLEL, 2), tmp_path)
    assert isinstance(error, PackageError) and "rank2/model.engine is blake3:" in error.message


def test_engines_of_other_ranks_are_refused(engines: Path, gpus: Gpus) -> None:
    """Of as many, too: which experts and columns a rank has is another matter."""
    for other in (Parallel(tensor=4), Parallel(tensor=2), Parallel(tensor=8, expert=2)):
        error = refuse(Rank(other, other.world - 1), engines)
        assert isinstance(error, PackageError) and "has engines of Parallel(tensor=4" in error.message
    assert gpus.done == []


def test_a_folder_without_engines_is_refused(tmp_path: Path, gpus: Gpus) -> None:
    error = refuse(Rank(PARALLEL, 0), tmp_path)
    assert isinstance(error, BuildError) and "engine.json" in error.message


@pytest.mark.parametrize(("seen", "told"), [(0, "sees none"), (2, "sees 2")])
def test_a_rank_without_a_gpu_says_so(
    seen: int, told: str, engines: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    error = refuse(Rank(PARALLEL, 2), engines)
    assert isinstance(error, CompatibilityError) and error.message.startswith("rank 2 of 4 runs on GPU 2")
    assert error.message.endswith(told) and gpus.done == []


def test_a_process_that_is_no_rank_says_so(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before NCCL is looked for: who calls it by itself has not joined the others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    error = refuse(Rank(PARALLEL, 0), engines)
    assert isinstance(error, CompatibilityError) and "this process is none of several" in error.message
