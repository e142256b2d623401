"""What the benchmark of kernels does beside a GPU: inputs, comparison, count of bytes, record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import compare, count_bytes, draw_inputs, main, record
from plugins.operation import Operation
from plugins.passed import find_run
from plugins.simulator import Simulator
from tests.plugins.test_paged_attention import GROUPED, LATENT
from tests.plugins.test_rope_paged_kv import HEADS
from tests.plugins.test_rope_paged_kv import LATENT as LATENT_ROPE

SPANS = [(20, 1), (0, 6)]


@pytest.mark.parametrize("operation", [HEADS, LATENT_ROPE, GROUPED, LATENT], ids=lambda operation: operation.NAME)
def test_right_kernels_pass_and_wrong_ones_do_not(simulator: Simulator, operation: Operation) -> None:
    inputs = draw_inputs(operation, SPANS, "cpu")
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
