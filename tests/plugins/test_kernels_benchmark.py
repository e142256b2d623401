"""What the benchmark of kernels does beside a GPU: inputs, comparison, count of bytes, record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import expert_inputs
from benchmarks.kernel_inputs import count_bytes, draw_inputs
from benchmarks.kernel_rows import BARS, Row, list_rows
from benchmarks.kernels import compare
from benchmarks.loopback import keep_local, loop_back
from benchmarks.passed import main as record_main
from plugins.operation import Exchange, Input, Operation, Scratch
from plugins.passed import find_run
from plugins.simulator import Simulator
from plugins.subjects import list_subjects
from tests.passes import save_fake_run
from tests.plugins.experts_cases import BASE, STORAGES
from tests.plugins.test_moe_all_to_all import COMBINE, DISPATCH
from tests.plugins.test_paged_attention import GROUPED, LATENT
from tests.plugins.test_rope_paged_kv import HEADS
from tests.plugins.test_rope_paged_kv import LATENT as LATENT_ROPE

SPANS = [(20, 1), (0, 6)]


# One rank of a group, whose messages come back to it.
EXPERTS = [replace(BASE, **STORAGES[storage]) for storage in ("int4", "fp8")]
EXCHANGED = [keep_local(op) for op in (replace(DISPATCH, payload="fp8", hidden=64), replace(COMBINE, hidden=64))]


@pytest.mark.parametrize(
    "operation", [HEADS, LATENT_ROPE, GROUPED, LATENT, *EXCHANGED, *EXPERTS], ids=lambda operation: operation.NAME
)
def test_right_kernels_pass_and_wrong_ones_do_not(simulator: Simulator, operation: Operation) -> None:
    inputs = draw_inputs(operation, SPANS, "cpu")
    assert len(inputs) == len(operation.input_types())
    assert [tensor.dim() for tensor in inputs] == [dims for _, dims in operation.INPUTS][: len(inputs)]
    factor = 1.0

    def start(op: Operation, own: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for output, found in zip(outputs, simulator.run(op, own), strict=True):
            output.copy_(found * factor)

    assert compare(operation, inputs, start) <= 1
    for wrong in (1.01, math.nan):
        factor = wrong
        assert compare(operation, inputs, start) > 1


def test_bytes_are_those_of_the_steps_own_rows() -> None:
    rows, heads, size = 7, 3, 8
    qkv, query, pools = rows * (heads + 2) * size * 4, rows * heads * size * 4, 2 * rows * size * 4
    tables = 2 * rows * size // 2 * 4
    inputs = draw_inputs(HEADS, SPANS, "cpu")
    step = sum(tensor.numel() * 4 for tensor in inputs[3:8])
    assert count_bytes(HEADS, inputs, SPANS) == qkv + query + pools + tables + step


def test_bytes_of_exchanged_rows_are_those_of_messages() -> None:
    dispatch, combine = EXCHANGED
    inputs = draw_inputs(dispatch, SPANS, "cpu")
    row, message = 64 * 4, 64 + 4 + 2 * 8 + 12
    messages = sum(len(set(row)) for row in (inputs[1] // 4).tolist())
    assert 7 < messages < 14
    assert count_bytes(dispatch, inputs, SPANS) == 7 * row + messages * (2 * message + row)
    assert count_bytes(combine, draw_inputs(combine, SPANS, "cpu"), SPANS) == (messages + 7) * row


def test_experts_cost_what_their_rows_chose() -> None:
    op = replace(EXPERTS[0], first=2, count=3)
    inputs = draw_inputs(op, SPANS, "cpu")
    inputs[2] = torch.tensor([[2, 4], [0, 4], [5, 1], [4, 2], [1, 0], [2, 5], [5, 4]], dtype=torch.int32)
    pairs, width, hidden = 7, op.width, op.hidden
    expert = 3 * (hidden * width // 2 + hidden * width // 32 * 4)
    assert count_bytes(op, inputs, SPANS) == 2 * expert + 7 * (hidden * 4 + 2 * (4 + 4) + hidden * 4)
    assert expert_inputs.count_operations(op, inputs) == pairs * 6 * width * hidden


def test_a_rank_alone_gets_back_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, as far as its driver is called."""
    read, copied = [], []

    class Driver:
        def read_integers(self, address: int, count: int, stream: int) -> list[int]:
            read.append((address, count, stream))
            return [3, 4]

        def copy(self, *numbers: int) -> None:
            copied.append(numbers)

    monkeypatch.setattr("benchmarks.loopback.open_driver", Driver)
    places: dict[object, int] = {Input(2): 300, Input(0): 100, Scratch(0): 900}
    step = COMBINE.launches([(14, 16), (7, 2), (2, 2)])[0]
    assert isinstance(step, Exchange)
    loop_back(step, places.__getitem__, 5)
    assert (read, copied) == ([(300, 2, 5)], [(900, 100, 7 * 64, 5)])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "passed.json"
    path.write_text(
        json.dumps({"runs": [{"source": "blake3:other", "sm": 80, "device": "A100", "date": "2026-01-01"}]})
    )
    return path


def test_a_saved_run_fills_the_table_once(tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_fake_run(tmp_path / "run.json")
    for _ in range(2):
        assert record_main([str(run)], table) == 0
    modules = {kernel.module for subject in list_subjects() for kernel in subject.operation.kernels()}
    runs = json.loads(table.read_text())["runs"]
    assert len(runs) == 1 + len(modules) and runs[0]["source"] == "blake3:other"
    for operation in (HEADS, LATENT_ROPE, GROUPED, BASE):
        for kernel in operation.kernels():
            assert str(find_run(kernel, 90, table)).startswith("NVIDIA H200, ")
            assert find_run(kernel, 80, table) is None
    assert "paged_attention, paged_latent_attention, SM90: passed on NVIDIA H200" in capsys.readouterr().out


FAULTS: dict[str, tuple[Callable[[Row], Row | None], str]] = {
    "wrong": (lambda row: replace(row, error=1.5), "is 1.5 of the bound from its reference"),
    "not a number": (lambda row: replace(row, error=math.nan), "is nan of the bound from its reference"),
    "not measured": (lambda row: replace(row, error=None), "prefill was not measured"),
    "failed": (lambda row: replace(row, error=None, failure="OutOfMemoryError"), "was not measured: OutOfMemoryError"),
    "missing": (lambda _: None, "prefill was not measured"),
    "edited": (lambda row: replace(row, sources=("blake3:before",)), "rope_paged_kv was edited since"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_row_keeps_its_kernels_out(
    fault: str, tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, why = FAULTS[fault]
    name = "rope_paged_kv, Llama-8B, fp8 cache, prefill"
    run = save_fake_run(tmp_path / "run.json", lambda row: change(row) if row.name == name else row)
    assert record_main([str(run)], table) == 0
    for operation in (HEADS, LATENT_ROPE):  # one module has both
        assert all(find_run(kernel, 90, table) is None for kernel in operation.kernels())
    assert all(find_run(kernel, 90, table) for kernel in GROUPED.kernels())
    assert why in capsys.readouterr().out


def test_a_run_of_nothing_records_nothing(tmp_path: Path, table: Path) -> None:
    before = table.read_text()
    assert record_main([str(save_fake_run(tmp_path / "run.json", lambda _: None))], table) == 1
    assert json.loads(table.read_text()) == json.loads(before)


def test_rows_say_which_bar_they_miss() -> None:
    row = replace(list_rows(90)[0][0], step="decode 256", error=0.1, seconds=2e-5, of_bandwidth=0.7, unfused=1.5)
    seen, missed = (
        "0.100 of the bound, 0.020 ms, 70% of bandwidth, ",
        "1.5 x unfused; below 80% of bandwidth; below 2 x",
    )
    assert row.describe() == seen + missed
    assert replace(row, of_floor=0.75).describe() == f"{seen}75% of floor, {missed}"
    assert (row.judge("NVIDIA A100-SXM4-80GB"), row.judge("NVIDIA H200")) == ("ok", "slow")  # the bars are an H200's
    assert replace(row, error=2.0).judge("NVIDIA H200") == "FAILED" and replace(row, error=None).judge("") == ""
    checked = replace(row, timed=False)
    assert (checked.describe(), checked.judge("NVIDIA H200")) == ("0.100 of the bound", "ok")
    fast = replace(row, of_bandwidth=0.8, unfused=2.0)
    assert fast.judge("NVIDIA H200") == "ok" and not fast.list_missed()
    assert replace(row, step="decode 1", unfused=2.0).list_missed() == []
    known = {(row.operation, row.step) for row, _ in list_rows(90)}
    assert all((operation, step) in known for operation, _, steps, *_ in BARS for step in steps)
