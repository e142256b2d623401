"""Checkpoints that other tools have quantized through `trtseek engine`: held as they are, proved, built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from tests.checkpoint.foreign.cases import CASES, write
from tests.end_to_end.support import write_project

NONE = "stages.quantize.method=none"
SOURCE_TYPE = "stages.convert.dtype=null"
# What is asked for beside, and the engine checkpoint's 8-bit tensors.
RUNS = {
    "awq": ((), {"I8": 15}),
    "gptq-moe": ((), {"I8": 111}),
    "gptq-act-order": (("stages.convert.foreign=dequantize",), {}),
    "modelopt-int8": ((SOURCE_TYPE,), {"I8": 15}),
    "compressed-fp8-static": (("target.gpu=L40S", SOURCE_TYPE), {"F8_E4M3": 15}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_from_anothers_checkpoint_to_an_engine(name: str, tmp_path: Path) -> None:
    settings, kept = RUNS[name]
    project = write_project(tmp_path / "run", write(name, tmp_path))
    result = project.trtseek("engine", "tiny.yaml", *(word for s in (NONE, *settings) for word in ("--set", s)))
    assert result.returncode == 0, result.stderr
    proof = json.loads((project.run / "verify/verify.json").read_text())
    assert all(gate["passed"] is not False for gate in proof["gates"])
    assert proof["network"]["max_logit_error"] < 1e-4
    assert proof["conversion"]["differing"] == {}
    engine = json.loads((project.run / "build/engine.json").read_text())
    assert engine["network_digest"] == proof["network_digest"]
    types = [info.dtype for info in CheckpointFolder.open(project.run / "convert").tensors.values()]
    assert {kind: types.count(kind) for kind in ("I8", "F8_E4M3") if kind in types} == kept
    told = json.loads((project.run / "convert/conversion.json").read_text())["foreign"]
    assert len(told["widened"]) == CASES[name].widened
    if told["widened"]:
        assert "15 linears are written in 16 bits" in result.stderr


def test_a_second_quantization_is_refused_before_any_work(tmp_path: Path) -> None:
    project = write_project(tmp_path / "run", write("awq", tmp_path))
    result = project.trtseek("engine", "tiny.yaml")
    assert result.returncode == 4
    assert "the model is quantized already" in result.stderr
    assert not project.run.exists() or not list(project.run.glob("*/artifact.json"))
