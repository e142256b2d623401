"""What the benchmark of kernels does beside a GPU: inputs, comparison, count of bytes, record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import expert_inputs
from benchmarks.kernels import compare, count_bytes, draw_inputs, main, record
from benchmarks.loopback import keep_local, loop_back
from plugins.operation import Exchange, Input, Operation, Scratch
from plugins.passed import find_run
from plugins.simulator import Simulator
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
    factor = 1.01
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


def test_a_run_is_recorded_once(tmp_path: Path) -> None:
    table = tmp_path / "passed.json"
    table.write_text('{"runs": []}')
    for _ in range(2):
        record([*HEADS.kernels(), *LATENT_ROPE.kernels()], 90, "NVIDIA H200", table)
    record(GROUPED.kernels(), 90, "NVIDIA H200", table)
    assert len(json.loads(table.read_text())["runs"]) == 2  # a row for each module
    assert str(find_run(HEADS.kernels()[0], 90, table)).startswith("NVIDIA H200, ")
    assert find_run(HEADS.kernels()[0], 80, table) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 4
    assert "sees no GPU" in capsys.readouterr().err
