"""Two and more runs at once, in one output folder and in several that share a store: the work once, the same bytes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults import children
from tests.faults.conftest import Finished

pytestmark = pytest.mark.timeout(children.HANG_S)


def wait_for(children_: list[int]) -> list[int]:
    return [children.wait_child(child) for child in children_]


@pytest.mark.parametrize("shared", ["output", "store"])
def test_four_runs_at_once(finished: Finished, workshop: Path, shared: str) -> None:
    configs = []
    for index in range(4):
        places = {"store": str(workshop / "store"), "output": str(workshop / f"out-{index}")}
        if shared == "output":
            places = {"output": str(workshop / "out")}
        configs.append(children.make_config(workshop, finished.model, **places))
    logs = [workshop / f"log-{index}" for index in range(4)]
    running = [children.start_child(config, log) for config, log in zip(configs, logs, strict=True)]
    assert wait_for(running) == [children.CLEAN] * 4, [children.read_log(log) for log in logs]
    for config in configs:
        assert children.read_results(config) == finished.results
    assert children.count_repeats(logs) == 0
    assert sum(": made in" in line for log in logs for line in children.read_log(log)) == len(children.NAMES)
    assert len([path for path in configs[0].store_folder.glob("[a-z]*/*") if path.is_dir()]) == len(children.NAMES)


def test_other_settings_at_once_in_one_output(finished: Finished, workshop: Path) -> None:
    """Two configs of one name: each makes its own, and one that the folder does not show to the end says so."""
    configs = [
        children.make_config(
            workshop,
            finished.model,
            stages={"convert": {"dtype": "float16"}, "quantize": {"method": "rtn", "group_size": group}},
        )
        for group in (32, 64)
    ]
    logs = [workshop / "log-0", workshop / "log-1"]
    running = [children.start_child(config, log) for config, log in zip(configs, logs, strict=True)]
    for code, log in zip(wait_for(running), logs, strict=True):
        refusals = [line for line in children.read_log(log) if line.startswith(("refused ", "crashed "))]
        # Whether they meet, and which of them links a stage last, is the machine's to decide.
        assert code == (children.REFUSED if refusals else children.CLEAN)
        assert all(line.startswith("refused NotShownError: ") for line in refusals), children.read_log(log)
    assert children.run_child(configs[0], workshop / "last") == children.CLEAN
    assert sum(": cached" in line for line in children.read_log(workshop / "last")) == len(children.NAMES)
    assert children.read_results(configs[0]) == finished.results


def test_killed_at_random_while_others_go_on(finished: Finished, workshop: Path) -> None:
    configs = [
        children.make_config(workshop, finished.model, store=str(workshop / "store"), output=str(workshop / f"out-{i}"))
        for i in range(2)
    ]
    for turn in range(10):
        logs = [workshop / f"log-{turn}-{index}" for index in range(2)]
        death = finished.events * (turn + 1) // 12
        running = [
            children.start_child(config, log, death=death if index == turn % 2 else None)
            for index, (config, log) in enumerate(zip(configs, logs, strict=True))
        ]
        codes = wait_for(running)
        # Where the other one made everything, this one had fewer events than it was to have.
        assert codes[turn % 2] in (-signal.SIGKILL, children.CLEAN)
        assert codes[1 - turn % 2] == children.CLEAN, children.read_log(logs[1 - turn % 2])
        assert children.read_results(configs[1 - turn % 2]) == finished.results
        if turn < 9:
            for path in sorted((workshop / "store").glob("*/*"), reverse=True):
                if path.is_dir() and path.parent.name != ".locks":
                    path.rename(workshop / f"gone-{turn}-{path.name}")
