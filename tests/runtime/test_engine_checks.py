"""The checks that a GPU is held to: a runner that does right passes, one that does wrong is found out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_checks
from benchmarks.engine_checks import BATCH, BLOCKS, CHUNK, LENGTH, ROWS, Subject, run_checks
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.runtime.runner import InterpreterRunner
from tests import fixtures
from tests.network import models
from tests.runtime import stand_in

LIMITS = BuildLimits(
    max_seq_len=LENGTH,
    max_batch_size=BATCH,
    max_num_tokens=ROWS,
    generation=(Rectangle(batch=BATCH, length=LENGTH),),
    block_size=16,
    max_blocks=BLOCKS,
    max_chunk=CHUNK,
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("checks")
    model = models.load(fixtures.llama(folder / "m", dtype="float32", num_hidden_layers=1))
    program = model.program(max_seq_len=LENGTH, block_size=16)
    return Subject(
        runner=stand_in.load(model, program, LIMITS, folder, rtx=False),
        exact=InterpreterRunner(program, mode="exact"),
        declared=InterpreterRunner(program, mode="declared"),
        block_size=16,
        vocab=512,
    )


def failing(subject: Subject) -> list[str]:
    return [name for name, holds, _ in run_checks(subject) if not holds]


def test_an_engine_that_does_as_the_interpreter_passes(subject: Subject) -> None:
    results = list(run_checks(subject))
    assert [name for name, _, _ in results] == list(engine_checks.CHECKS)
    assert all(holds and seen for _, holds, seen in results), results
    assert subject.runner.device.replays > 10  # type: ignore[attr-defined]


def swap_rows(step: Any) -> Any:
    """The logits of the sequences in another order."""
    return lambda inputs: step(inputs).flip(0)


def stay_behind(step: Any) -> Any:
    """The logits of the step before, as from a buffer that was read too early."""
    last: list[torch.Tensor] = []

    def lagging(inputs: Any) -> torch.Tensor:
        last.append(step(inputs))
        return last[-2] if len(last) > 1 and last[-2].shape == last[-1].shape else last[-1]

    return lagging


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (swap_rows, {"context steps", "generation steps", "greedy tokens"}),
        (stay_behind, {"generation steps", "greedy tokens"}),
    ],
)
def test_wrong_logits_are_found_out(
    subject: Subject, broken: Any, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.runner, "step", broken(subject.runner.step))
    assert found <= set(failing(subject))


def nothing(blocks: Sequence[Any]) -> None:
    pass


@pytest.mark.parametrize("method", ["copy_blocks", "zero_blocks"])
def test_blocks_that_stay_as_they_were_are_found_out(
    subject: Subject, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.runner, method, nothing)
    assert failing(subject) == ["blocks"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 4
    assert "sees no GPU" in capsys.readouterr().err
