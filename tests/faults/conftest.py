"""One finished run that every fault is held against."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from tests import fixtures
from tests.faults import children


@dataclass(frozen=True)
class Finished:
    """An undisturbed run: its folder, its results, and how many events it had."""

    folder: Path
    model: Path
    config: Config
    results: dict[str, bytes]
    events: int


@pytest.fixture(scope="session", autouse=True)
def server() -> Iterator[None]:
    yield
    children.stop_server()


@pytest.fixture(scope="session")
def memory_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose fsync is free, for what a kill may interrupt but no power cut: SIGKILL loses nothing written."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or shutil.disk_usage(place).free < 500_000_000:
        yield tmp_path_factory.mktemp("disk")
        return
    folder = Path(tempfile.mkdtemp(prefix="trtseek-faults-", dir=place))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def workshop(memory_disk: Path) -> Iterator[Path]:
    """As tmp_path, on the memory disk, and gone after the test."""
    folder = Path(tempfile.mkdtemp(dir=memory_disk))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def finished(memory_disk: Path) -> Finished:
    folder = memory_disk / "finished"
    model = fixtures.deepseek_v2(
        folder / "model",
        tokenizer=True,
        num_hidden_layers=3,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        vocab_size=260,
    )
    for path in model.iterdir():
        os.utime(path, (1e9, 1e9))  # old enough for their digests to be kept
    config = children.make_config(folder / "project", model)
    log = folder / "log"
    assert children.run_child(config, log) == children.CLEAN, children.read_log(log)
    results = children.read_results(config)
    assert sum(name.endswith(".safetensors") for name in results) > 15
    return Finished(folder / "project", model, config, results, children.count_events(log))
