"""One finished run that every fault is held against."""

from __future__ import annotations

import os
import shutil
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


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """As tmp_path, and gone after the test: some fill a hundred megabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
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
