"""SIGKILL at many points of a run: the next one ends in the same bytes and repeats at most one shard or layer."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.stages.collection import remove, survey
from pipeline.stages.store import Store
from tests.faults import children
from tests.faults.conftest import Finished

pytestmark = pytest.mark.timeout(children.HANG_S)

POINTS = 120
BATCHES = 6


def pick_points(events: int) -> list[int]:
    """Seeded, and spread evenly: one at random within each of POINTS stretches of the run."""
    generator = random.Random(3)
    return [1 + int((index + generator.random()) * (events - 1) / POINTS) for index in range(POINTS)]


def assert_whole(config: Config) -> None:
    """Whatever stands in an output's place is all there."""
    assert children.find_damage(config) == 0
    for link in config.run_folder.glob("*"):
        assert link.exists() or link.name.startswith("."), link


@pytest.mark.parametrize("batch", [0, *(pytest.param(i, marks=pytest.mark.thorough) for i in range(1, BATCHES))])
def test_a_run_killed_at_any_point_goes_on_to_the_same_bytes(finished: Finished, workshop: Path, batch: int) -> None:
    points = pick_points(finished.events)
    assert len(set(points)) >= 100
    for point in points[batch::BATCHES]:
        folder = workshop / str(point)
        config = children.make_config(folder, finished.model)
        logs = [folder / "first", folder / "second"]
        assert children.run_child(config, logs[0], death=point) == -signal.SIGKILL
        assert_whole(config)
        assert children.run_child(config, logs[1]) == children.CLEAN, (point, children.read_log(logs[1]))
        assert children.read_results(config) == finished.results, point
        assert children.count_repeats(logs) <= 1, (point, [children.read_log(log) for log in logs])
        # A kill right after a result was put in its place may leave the journal, which nothing uses.
        garbage = [holding for holding in survey(Store(config.store_folder)) if not holding.used]
        assert all(holding.kind != "artifact" and holding.nbytes < 10_000 for holding in garbage), point
        remove(Store(config.store_folder), garbage)
        assert not list((config.store_folder / ".partial").iterdir()), point
        shutil.rmtree(folder)


def test_killed_over_and_over(finished: Finished, workshop: Path) -> None:
    """A machine that gives every run 60 events more than the last: each goes on where the one before was."""
    config = children.make_config(workshop, finished.model)
    logs: list[Path] = []
    for death in range(60, 100 * 60, 60):
        logs.append(workshop / f"log-{death}")
        code = children.run_child(config, logs[-1], death=death)
        if code == children.CLEAN:
            break
        assert code == -signal.SIGKILL, children.read_log(logs[-1])
    assert code == children.CLEAN
    assert len(logs) > 3
    assert children.read_results(config) == finished.results
    assert children.count_repeats(logs) <= len(logs) - 1


def test_the_harness_would_notice(finished: Finished, workshop: Path) -> None:
    """Work that is repeated is counted: a run from nothing twice repeats every file."""
    configs = [children.make_config(workshop / name, finished.model) for name in ("a", "b")]
    logs = [workshop / "log a", workshop / "log b"]
    for config, log in zip(configs, logs, strict=True):
        assert children.run_child(config, log) == children.CLEAN
    files = sum(name.endswith(".safetensors") and not name.startswith("package/") for name in finished.results)
    assert children.count_repeats(logs) == files
