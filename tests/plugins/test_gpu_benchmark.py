"""The benchmark of a GPU where there is none: every row is there, one that fails is a row, and none is the end."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ceilings, gpu, kernels
from benchmarks.engine_checks import CHECKS
from benchmarks.isolation import LostError, stream
from benchmarks.kernel_rows import STEPS, Row, list_rows
from pipeline.errors import CompatibilityError
from plugins.carried import Carried
from plugins.operation import Operation
from plugins.simulator import Simulator
from tests.plugins.ending import count_to, lose_the_first, write_and_hang
from tests.plugins.test_rope_paged_kv import HEADS

FOUR = list(STEPS)[:4]
ROWS = [(Row(operation="rope_paged_kv", model="tiny", step=step, sources=()), HEADS) for step in FOUR]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("raise", "ValueError: all of it"),
        ("die", r"its process died \(exit code 7\)"),
        ("hang", "nothing came for 6 s"),
    ],
)
def test_what_came_before_the_end_is_kept(then: str, why: str) -> None:
    found = []
    with pytest.raises(LostError, match=why):
        for result in stream(count_to, (2, then), patience=6 if then == "hang" else 60, until=time.monotonic() + 60):
            found.append(result)
    assert found == [0, 1]


def test_what_ends_well_is_whole() -> None:
    assert list(stream(count_to, (3, ""), patience=60, until=time.monotonic() + 60)) == [0, 1, 2]


def test_nothing_lasts_beyond_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(LostError):
        list(stream(count_to, (2, "hang"), patience=60, until=began + 4))
    assert time.monotonic() - began < 10


def test_what_is_cut_off_leaves_no_files() -> None:
    running = stream(write_and_hang, (5,), patience=60, until=time.monotonic() + 60)
    place = Path(next(running))
    assert place.stat().st_size == 5
    running.close()
    assert not place.parent.exists()


def never_answer(*_: object, **__: object) -> Iterator[Row]:
    raise LostError("no GPU answers")
    yield


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "list_rows", lambda sm: list(ROWS))
    monkeypatch.setattr(kernels, "compile_all", lambda operations, sm: {HEADS: Carried({})})


def measure(seconds: float = 600) -> list[Row]:
    now = time.monotonic()
    return list(kernels.measure_kernels(90, now + seconds, now + seconds))


def test_rows_after_a_lost_one_are_measured(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_rows", lose_the_first)
    found = measure()
    assert [row.step for row in found] == FOUR
    assert [row.judge("") for row in found] == ["ok", "FAILED", "ok", "FAILED"]
    assert found[1].describe() == "illegal access" and "exit code 1" in found[3].describe()


def end_badly(work: object, arguments: tuple[list[tuple[Row, Operation]], Any, Any], **_: object) -> Iterator[Row]:
    for row, _operation in arguments[0]:
        yield replace(row, error=0.5)
    raise LostError("its process died")


def test_a_process_may_die_after_its_last_row(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "stream", end_badly)
    assert [row.judge("") for row in measure()] == ["ok"] * 4


def test_a_gpu_that_never_answers_is_given_up(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "stream", never_answer)
    assert [row.describe() for row in measure()] == ["no GPU answers"] * 3 + ["not measured"]
    assert [row.describe() for row in measure(0)] == ["not measured"] * 4


def test_rows_are_measured_one_by_one(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU: what does not compile, or fails in a run, is a row among the others."""

    def start(operation: Operation, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if len(inputs[0]) == 3:
            raise torch.OutOfMemoryError("no room")
        for output, found in zip(outputs, simulator.run(operation, inputs), strict=True):
            output.copy_(found)

    steps = dict(zip(FOUR, [[(3, 1)], [(3, 3)], [(3, 1), (0, 3)], [(0, 5)]], strict=True))
    fakes: dict[str, Any] = {
        "DEVICE": "cpu",
        "STEPS": steps,
        "measure_copies": lambda: 1e9,
        "measure_products": lambda: 1e12,
        "_make_starter": lambda *_: start,
        "time_run": lambda run: (run() and 0.0) or 1e-3,
        "_is_alive": lambda: True,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(kernels, name, fake)
    broken = replace(HEADS, heads=4)
    rows = [*ROWS, (replace(ROWS[0][0], model="broken"), broken)]
    found = list(kernels.measure_rows(rows, {HEADS: Carried({}), broken: "BuildError: no"}, time.monotonic() + 60))
    assert [row.judge("") for row in found] == ["ok", "FAILED", "ok", "ok", "FAILED"]
    assert found[1].describe() == "OutOfMemoryError: no room" and found[4].describe() == "BuildError: no"
    assert all(row.error == 0 and row.of_floor == row.of_bandwidth > 0 for row in (found[0], *found[2:4]))
    assert [row.describe() for row in kernels.measure_rows(ROWS[:1], {HEADS: Carried({})}, 0)] == ["not measured"]
    untimed = [(replace(ROWS[0][0], timed=False), HEADS)]
    (checked,) = kernels.measure_rows(untimed, {HEADS: Carried({})}, time.monotonic() + 60)
    assert (checked.error, checked.seconds, checked.describe()) == (0, 0.0, "0.000 of the bound")


def test_what_does_not_compile_is_told() -> None:
    """FP8 on SM80, which has no such type."""
    fp8 = replace(HEADS, pool_dtype="fp8")
    found = kernels.compile_all([HEADS, fp8, HEADS], 80)
    assert found.keys() == {HEADS, fp8} and "does not compile for SM80" in str(found[fp8])
    assert isinstance(kept := found[HEADS], Carried) and [*kept.functions] == [(0, 80)]


def test_times_are_medians_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, synchronize=lambda: None))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    assert ceilings.time_run(lambda: next(clock)) == 2e-3  # milliseconds, with the run's own tick between


def without_a_gpu(*_: object) -> None:
    raise CompatibilityError("torch sees no GPU, and an engine runs on one")


def test_without_a_gpu_the_table_says_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CudaDevice", without_a_gpu)
    assert gpu.main(["--save", str(tmp_path / "run.json")]) == 4
    told = capsys.readouterr()
    assert "sees no GPU" in told.err and not (tmp_path / "run.json").exists()
    lines = told.out.splitlines()
    assert all(line.endswith("not measured") for line in lines)
    for title in ("engine", "engine of plugins"):
        for name in ("built", "loaded", *CHECKS, "step of batch 1", "step of batch 8"):
            assert any(line.startswith(f"{title}, {name}  ") for line in lines), name
    assert len(lines) == 2 * (4 + len(CHECKS)) + len(list_rows(120))
    assert gpu.main(["--only", "engine", "--run", "out"]) == 4
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(CHECKS)


def test_an_engine_that_cannot_be_built_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process finds no GPU here; the kernels are measured, and saved as they come."""
    if torch.cuda.is_available():
        pytest.skip("builds one")
    saved = tmp_path / "run.json"

    def measure_kernels(*_: object) -> Iterator[Row]:
        for row, _operation in ROWS:
            yield replace(row, error=0.5, of_bandwidth=0.9, unfused=3.0)
            assert json.loads(saved.read_text())["rows"][-1]["step"] == row.step

    monkeypatch.setattr(gpu, "CudaDevice", lambda: SimpleNamespace(name="NVIDIA H200", sm=90))
    monkeypatch.setattr(gpu, "measure_kernels", measure_kernels)
    assert gpu.main(["--save", str(saved)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NVIDIA H200, SM90")
    for title in ("engine", "engine of plugins"):
        (built, loaded, *_) = [line for line in lines if line.startswith(f"{title}, ")]
        assert " FAILED " in built and "sees no GPU" in built and loaded.endswith("not measured")
    assert sum(" ok " in line for line in lines) == len(ROWS)


@pytest.mark.parametrize(("device", "status"), [("NVIDIA H200", 1), ("NVIDIA A100-SXM4-80GB", 0)])
def test_a_missed_bar_counts_on_the_card_that_has_it(
    device: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CudaDevice", lambda: SimpleNamespace(name=device, sm=90))
    monkeypatch.setattr(gpu, "measure_kernels", lambda *_: iter([replace(ROWS[0][0], error=0.5, unfused=1.0)]))
    assert gpu.main(["--only", "kernels"]) == status
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert (" slow " if status else " ok ") in line and "below 2 x" in line
