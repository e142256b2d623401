"""TensorRT compiles the networks, on this CPU, for the targets of the product; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engine.engine_file import inspect_engine

INT4_GEMM = "__myl_ReplCastMulCastFc"
ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


def _build(tmp_path: Path, model: str, moe: str, sm: str) -> Path:
    output = tmp_path / "m.engine"
    command = [sys.executable, "-m", "tests.network.build_engine", str(tmp_path / "hf"), model, moe, sm, str(output)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return output


@pytest.mark.parametrize(
    ("model", "moe", "sm"),
    [
        ("llama-int4", "dense", "SM80"),
        ("v2-int4", "dense", "SM120"),
        ("v3-int4", "dense", "SM80"),
        pytest.param("v3-int4", "gather", "SM120", marks=slow),
        pytest.param("v3-bf16", "dense", "SM80", marks=slow),
        pytest.param("v3-fp8", "gather", "SM120", marks=slow),
        pytest.param("qwen2-int4", "dense", "SM80", marks=slow),
        pytest.param("v2-lite-int4", "dense", "SM80", marks=slow),
        pytest.param("v2-int4", "gather", "SM80", marks=slow),
        pytest.param("v2-int4", "gather", "SM120", marks=slow),
        pytest.param("v2-int4", "dense", "SM80", marks=slow),
        pytest.param("v2-fp16", "dense", "SM80", marks=slow),
        pytest.param("v2-fp16", "gather", "SM120", marks=slow),
        pytest.param("v2-fp16", "dense", "SM89", marks=slow),
        pytest.param("llama-fp16", "dense", "SM120", marks=slow),
        pytest.param("llama-fp16", "dense", "SM86", marks=slow),
        pytest.param("llama-bf16", "dense", "SM80", marks=slow),
        pytest.param("llama-fp32", "dense", "SM80", marks=slow),
        pytest.param("llama-int4", "dense", "SM120", marks=slow),
    ],
)
def test_the_network_builds(model: str, moe: str, sm: str, tmp_path: Path) -> None:
    engine = inspect_engine(_build(tmp_path, model, moe, sm))
    assert engine.targets == (int(sm.removeprefix("SM")),)
    kernels = [profile.graph.kernels for profile in engine.profiles]
    fused = [profile.graph.fusions.get(INT4_GEMM, 0) for profile in engine.profiles]
    assert len(kernels) == (1 if moe == "gather" else 2)
    if model in ("llama-fp16", "llama-bf16", "llama-int4"):
        # Attention stays one kernel per layer although it may be decomposed: for chunks, and for single queries.
        assert (kernels[0]["_gemm_mha_v2"], kernels[1]["_gemv_mha_v1"]) == (2, 2)
    if model == "llama-int4":
        assert fused == [10, 10]  # qkv, dense, fc, gate and proj of two layers: dequantized inside the GEMM
    if (model, moe) == ("v2-int4", "dense"):
        # Layer 0: dense, fc, gate, proj. Layer 1: dense, the shared experts' three, and the routed experts' fc and gate
        # as one stack each; their proj has a single group, which TensorRT dequantizes apart.
        assert fused == [10, 10]


@slow
def test_fp8_blocks_stay_fp8_in_the_engine(tmp_path: Path) -> None:
    """Linears take a byte a weight and a scale for 16384 of them; SM80 has no FP8, and TensorRT says so."""
    (tmp_path / "fp8").mkdir()
    (tmp_path / "bf16").mkdir()
    kept = inspect_engine(_build(tmp_path / "fp8", "v3-wide-fp8", "dense", "SM89"))
    wide = inspect_engine(_build(tmp_path / "bf16", "v3-wide-bf16", "dense", "SM89"))
    assert 0.5 < kept.weights_bytes / wide.weights_bytes < 0.55
    with pytest.raises(AssertionError, match="fp8_e4m3"):
        _build(tmp_path / "fp8", "v3-wide-fp8", "dense", "SM80")
