"""Clocks that jump, and files whose times tell nothing: no result changes, and what was changed is found."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults import children
from tests.faults.conftest import Finished

pytestmark = pytest.mark.timeout(children.HANG_S)

DAY = 86_400


def jump() -> None:
    """In a child: every reading of the wall clock is off by up to a year, forwards or backwards."""
    generator = random.Random(5)
    true_ns: Any = time.time_ns

    def off() -> int:
        return int(true_ns()) + generator.randint(-365 * DAY, 365 * DAY) * 10**9

    time.time_ns = off
    time.time = lambda: off() / 1e9


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_a_clock_that_jumps_at_every_reading(finished: Finished, workshop: Path) -> None:
    config = children.make_config(workshop, finished.model)
    assert children.run_child(config, workshop / "log", prepare=jump) == children.CLEAN
    assert children.read_results(config) == finished.results
    assert children.run_child(config, workshop / "again", prepare=jump) == children.CLEAN
    assert sum(": cached" in line for line in children.read_log(workshop / "again")) == len(children.NAMES)


@pytest.mark.parametrize("shift", [-400 * DAY, -1, 1, 400 * DAY, None])
def test_other_times_on_every_file_make_nothing_again(finished: Finished, workshop: Path, shift: int | None) -> None:
    """As after a restore from a backup; None: times in a random order."""
    folder = children.copy_project(finished.folder, workshop / "project")
    config = children.make_config(folder, finished.model)
    generator = random.Random(7)
    now = time.time()
    for file in all_files(folder):
        moved = now + (generator.uniform(-400, 400) * DAY if shift is None else shift)
        os.utime(file, (moved, moved))
    assert children.run_child(config, workshop / "log") == children.CLEAN
    log = children.read_log(workshop / "log")
    assert sum(": cached" in line for line in log) == len(children.NAMES), log
    assert children.read_results(config) == finished.results


@pytest.mark.parametrize("shift", [-400 * DAY, 0, 400 * DAY])
def test_a_killed_run_goes_on_under_another_time(finished: Finished, workshop: Path, shift: int) -> None:
    config = children.make_config(workshop, finished.model)
    logs = [workshop / "first", workshop / "second"]
    children.run_child(config, logs[0], death=finished.events // 2)
    for file in all_files(config.output):
        status = file.stat()
        os.utime(file, (status.st_atime + shift, status.st_mtime + shift))
    assert children.run_child(config, logs[1], prepare=jump) == children.CLEAN
    assert children.read_results(config) == finished.results
    assert children.count_repeats(logs) <= 1


def test_a_source_that_changed_while_the_clock_stood_still(finished: Finished, workshop: Path) -> None:
    """Written over within a tick of the clock, to the same size: still found, since young files are read again."""
    from tests import fixtures

    def write(seed: int) -> None:
        fixtures.llama(workshop / "model", tokenizer=True, num_hidden_layers=1, seed=seed)

    write(1)
    config = children.make_config(workshop, workshop / "model")
    moment = time.time_ns()
    for path in (workshop / "model").iterdir():
        os.utime(path, ns=(moment, moment))
    assert children.run_child(config, workshop / "first") == children.CLEAN
    before = children.read_results(config)
    write(2)
    for path in (workshop / "model").iterdir():
        os.utime(path, ns=(moment, moment))
    assert children.run_child(config, workshop / "second") == children.CLEAN
    after = children.read_results(config)
    assert before.keys() == after.keys()
    assert before != after
