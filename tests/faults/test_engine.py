"""The real command, killed within every stage in turn; each run goes on where the last one was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stages.graph import NAMES
from tests.end_to_end.support import Project, write_project
from tests.faults.children import HANG_S, count_repeats, read_log

pytestmark = [pytest.mark.timeout(HANG_S), pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
SOME = ("job", "sensitivity")  # of engines that TensorRT-LLM builds, and of recipes
STAGES = tuple(name for name in NAMES if name not in SOME)
KILLS = ("convert", "quantize", "quantize", "prove", "prove", "verify", "build", "build", "package")


def run_engine(project: Project, log: Path, *target: str) -> int:
    command = [sys.executable, "-m", "tests.faults.command", str(log), *target, "--", "engine", "tiny.yaml"]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)  # shown where the test fails
    return done.returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, deepseek_v2_path: Path) -> tuple[Project, dict[str, int]]:
    """The project, and how many events each of its stages had."""
    project = write_project(tmp_path_factory.mktemp("undisturbed"), deepseek_v2_path)
    log = project.folder / "log"
    assert run_engine(project, log) == 0, read_log(log)
    (line,) = (line for line in read_log(log) if line.startswith("counts "))
    return project, json.loads(line.removeprefix("counts "))


def test_killed_in_every_stage(
    undisturbed: tuple[Project, dict[str, int]], tmp_path: Path, deepseek_v2_path: Path
) -> None:
    whole, events = undisturbed
    project = write_project(tmp_path / "project", deepseek_v2_path)
    generator = random.Random(11)
    logs: list[Path] = []
    for index, stage in enumerate(KILLS):
        logs.append(tmp_path / f"log-{index}")
        event = generator.randrange(1, events[stage] // 2)  # a run that goes on has fewer events left
        assert run_engine(project, logs[-1], stage, str(event)) == -signal.SIGKILL, read_log(logs[-1])
        killed = read_log(logs[-1])[-1]
        assert killed.startswith(f"killed in {stage}"), killed
        for earlier in STAGES[: STAGES.index(stage)]:
            assert project.digests(earlier)
    logs.append(tmp_path / "last")
    assert run_engine(project, logs[-1]) == 0, read_log(logs[-1])
    for stage in ("convert", "quantize", "prove", "verify"):
        assert project.digests(stage) == whole.digests(stage)
    assert count_repeats(logs) <= len(KILLS)
    manifests = [
        json.loads((each.run / "package" / "manifest.json").read_text())["network_digest"] for each in (whole, project)
    ]
    assert manifests[0] == manifests[1]
    assert not list((project.folder / "out" / "store" / ".partial").iterdir())
    again = project.trtseek("engine", "tiny.yaml")
    assert again.stderr.count("cached") == len(STAGES), again.stderr
