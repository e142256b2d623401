"""INT4 with FP8 inputs: what TensorRT-LLM divides on loading, it divides without rounding; the network computes it."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import QuantizationError
from pipeline.evaluation.forward import read_program
from pipeline.network.spec import NetworkSpec
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.w4a8 import input_step, second_scale
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Model, Settings

ALL = ("mlp", "attention_output", "attention_input")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("w4a8")
    hub = fixtures.llama(folder / "hub", dtype="float16", tokenizer=True, num_hidden_layers=1)
    text = folder / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(200)))
    settings = Settings(
        method="awq_fp8",
        group_size=64,
        include=ALL,
        calibration=CalibrationSettings(files=(text,), samples=4, length=32),
    )
    source = Model.load(hub).write(folder / "engine", hub)
    quantize_checkpoint(source, FolderWorkspace(folder / "q", journal=folder / "journal"), settings=settings)
    return CheckpointFolder.open(folder / "q")


def is_power(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def test_scales_are_whole_in_float16(quantized: CheckpointFolder) -> None:
    names = [name for name in quantized.tensors if name.endswith("weights_scaling_factor_2")]
    assert len(names) == 5
    for name in names:
        scales, second = quantized.read(name[:-2]).to_torch(), quantized.read(name).to_torch()
        assert is_power(float(second))
        kept = (scales / second).half()
        assert float(kept.max()) <= 64  # times the largest weight, 7, within E4M3's 448
        assert torch.equal(kept.float() * second, scales)
        step = quantized.read(name.replace("weights_scaling_factor_2", "activation_scaling_factor")).to_torch()
        assert step.shape == (1,) and is_power(float(step))


def test_inputs_are_rounded_to_fp8_and_weights_int4(quantized: CheckpointFolder) -> None:
    spec = NetworkSpec(dtype="float16", max_seq_len=32, block_size=16)
    nodes = read_program(quantized, quantized.architecture, spec).nodes
    rounded = [node.outputs[0] for node in nodes if node.kind == "quantize"]
    assert len(rounded) == 5 and {output.dtype for output in rounded} == {"fp8"}


def test_steps() -> None:
    assert input_step(448.0) == 1.0
    assert input_step(449.0) == 2.0
    assert input_step(0.0) == 1.0


def test_scales_that_float16_cannot_hold_are_refused() -> None:
    assert float(second_scale(torch.tensor([[64.0, 2.0**-10]]))) == 1.0
    with pytest.raises(QuantizationError, match=r"X: its group scales reach from 1\.2e-08 to 64"):
        second_scale(torch.tensor([[64.0, 1.2e-8]]), name="X")
