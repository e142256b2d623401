"""Every architecture through `trtseek engine`: converted, quantized, proved, built. Random weights of a megabyte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.exports.formats import export_checkpoint
from tests import fixtures
from tests.end_to_end.support import write_project
from tests.exports.test_hf import assert_same_folder

V3_FP8: Callable[[Path], Path] = lambda path: fixtures.deepseek_v3(path, fp8=True, tokenizer=True)  # noqa: E731
KEEP = "stages.convert.dtype=null"


@dataclass(frozen=True)
class Case:
    """int4: linears that are quantized; kept: FP8 linears in the engine's checkpoint, the MTP layer's among them."""

    write: Callable[[Path], Path]
    settings: tuple[str, ...]
    sm: int
    int4: int
    kept: int = 0


CASES = {
    "qwen2-awq": Case(lambda p: fixtures.qwen2(p, tokenizer=True), (), 80, 12),
    "r1-distill-llama-awq": Case(lambda p: fixtures.llama(p, tokenizer=True, **fixtures.R1_DISTILL_LLAMA), (), 80, 12),
    # Dense: dense, fc, gate, proj. Routed: dense, 3 shared, 3 of each expert.
    "moe-awq": Case(lambda p: fixtures.deepseek_moe(p, tokenizer=True), (), 80, 4 + 2 * (4 + 3 * 16)),
    "v2-lite-rtn": Case(
        lambda p: fixtures.deepseek_v2(p, tokenizer=True, **fixtures.V2_LITE_SHAPES),
        ("stages.quantize.method=rtn",),
        80,
        4 + 4 + 3 * 64,
    ),
    "v3-fp8-awq": Case(V3_FP8, (KEEP,), 80, 4 + 2 * (4 + 3 * 16), kept=5 + 3 + 3 * 16),
    "v3-fp8-rtn-widened": Case(
        V3_FP8, ("stages.convert.dtype=bfloat16", "stages.quantize.method=rtn"), 120, 4 + 2 * (4 + 3 * 16)
    ),
    "v3-fp8-kept": Case(
        V3_FP8, (KEEP, "stages.quantize.method=none", "target.gpu=L40S"), 89, 0, kept=4 * 5 + 3 + 3 * (3 + 3 * 16)
    ),
}


def _trtseek_engine(case: Case, tmp_path: Path) -> Any:
    gpu = {"120": ("target.gpu=RTX-5090",)}.get(str(case.sm), ())
    project = write_project(tmp_path / "run", case.write(tmp_path / "hf"))
    sets = [word for setting in (*case.settings, *gpu) for word in ("--set", setting)]
    return project, project.trtseek("engine", "tiny.yaml", *sets)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_from_the_hub_to_an_engine(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    project, result = _trtseek_engine(case, tmp_path)
    assert result.returncode == 0, result.stderr
    proof = json.loads((project.run / "verify/verify.json").read_text())
    assert all(gate["passed"] is not False for gate in proof["gates"])
    assert proof["network"]["max_logit_error"] < 1e-4
    assert proof["network"]["positions"] > 20
    assert proof["conversion"]["differing"] == {}
    engine = json.loads((project.run / "build/engine.json").read_text())
    assert (engine["sm"], engine["network_digest"]) == (case.sm, proof["network_digest"])
    stored = CheckpointFolder.open(project.run / ("quantize" if case.int4 else "convert")).tensors
    types = [info.dtype for info in stored.values()]
    assert (types.count("I8"), types.count("F8_E4M3")) == (case.int4, case.kept)
    if case.kept:  # the converted checkpoint, the MTP layer with it, is still the hub's
        export_checkpoint(CheckpointFolder.open(project.run / "convert"), tmp_path / "back")
        assert_same_folder(tmp_path / "hf", tmp_path / "back")
    if name == "v2-lite-rtn":  # 10944 = 64 * 171
        report = json.loads((project.run / "quantize/quantization.json").read_text())
        assert report["smaller_groups"] == {"transformer.layers.0.mlp.proj": 64}


def test_fp8_for_a_gpu_without_it_is_refused_before_any_work(tmp_path: Path) -> None:
    case = Case(V3_FP8, (KEEP, "stages.quantize.method=none"), 80, 0)
    project, result = _trtseek_engine(case, tmp_path)
    assert result.returncode == 4
    assert "needs FP8 tensor cores, SM89 or later; the A100-80GB is SM80" in result.stderr
    assert "stages.convert.dtype: bfloat16" in result.stderr
    assert not project.run.exists() or not list(project.run.glob("*/artifact.json"))
