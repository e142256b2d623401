"""TensorRT compiles the networks, on this CPU, for the targets of the product; each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.weights import estimate_weights
from pipeline.quantization.selection import Override, Rules

INT4_GEMM = "__myl_ReplCastMulCastFc"
EIGHT_BIT_GEMM = "__myl_CastMulCastFc"
ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


def _build(tmp_path: Path, model: str, moe: str, sm: str, *sizes: int) -> Path:
    output = tmp_path / "m.engine"
    command = [sys.executable, "-m", "tests.network.build_engine", str(tmp_path / "hf"), model, moe, sm, str(output)]
    command += map(str, sizes)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return output


@pytest.mark.parametrize(
    ("model", "moe", "sm"),
    [
        ("llama-int4", "dense", "SM80"),
        ("v2-int4", "dense", "SM120"),
        ("v3-int4", "dense", "SM80"),
        ("llama-fp8", "dense", "SM89"),
        ("v3-stacks-int8_sq", "dense", "SM80"),
        ("llama-head-int8", "dense", "SM80"),
        pytest.param("llama-head-int4", "dense", "SM80", marks=slow),
        pytest.param("llama-fp8_rows", "dense", "SM89", marks=slow),
        pytest.param("moe-fp8_rows", "dense", "SM89", marks=slow),
        pytest.param("moe-fp8_rows", "gather", "SM120", marks=slow),
        pytest.param("moe-fp8_wide_inputs", "dense", "SM89", marks=slow),
        pytest.param("llama-int8", "dense", "SM80", marks=slow),
        pytest.param("llama-int8_sq", "dense", "SM80", marks=slow),
        pytest.param("llama-int8_sq", "dense", "SM75", marks=slow),
        pytest.param("llama-int8_sq", "dense", "SM120", marks=slow),
        pytest.param("llama-fp8", "dense", "SM120", marks=slow),
        pytest.param("v3-stacks-fp8", "dense", "SM89", marks=slow),
        pytest.param("v3-stacks-fp8", "gather", "SM120", marks=slow),
        pytest.param("v3-stacks-int8", "dense", "SM86", marks=slow),
        pytest.param("v3-stacks-int8_sq", "gather", "SM80", marks=slow),
        pytest.param("llama-mixed", "dense", "SM89", marks=slow),
        pytest.param("v3-int4", "gather", "SM120", marks=slow),
        pytest.param("v3-bf16", "dense", "SM80", marks=slow),
        pytest.param("v3-fp8", "gather", "SM120", marks=slow),
        pytest.param("qwen2-int4", "dense", "SM80", marks=slow),
        pytest.param("moe-bf16", "dense", "SM80", marks=slow),
        pytest.param("moe-int4", "dense", "SM80", marks=slow),
        pytest.param("moe-int4", "gather", "SM120", marks=slow),
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
    if model == "llama-fp8_rows":
        assert [k["fully_connected"] for k in kernels] == [10, 10]  # a scale for each output is fused as one is
    if model == "llama-head-int4":
        assert fused == [5 + 1] * 2
    if (model, moe) == ("v2-int4", "dense"):
        # Layer 0: dense, fc, gate, proj. Layer 1: dense, the shared experts' three, and the routed experts' fc and gate
        # as one stack each; their proj has a single group, which TensorRT dequantizes apart.
        assert fused == [10, 10]

    if model in EIGHT_BIT:
        for profile in engine.profiles:
            held = Counter(t.dtype for region in profile.graph.regions for t in region.tensors)
            _check_eight_bit(model, profile.graph.kernels, profile.graph.fusions, held)
        architecture = parse_architecture(json.loads((tmp_path / "hf" / "config.json").read_text()))
        planned = estimate_weights(architecture, dtype=architecture.dtype, max_seq_len=256, rules=RULES[model])
        assert 0.99 < engine.weights_bytes / planned < 1.01


# Model -> GEMMs of 8-bit numbers; GEMMs into which the dequantization of 8-bit weights is fused.
EIGHT_BIT = {
    "llama-fp8": (10, 0),
    "llama-int8_sq": (10, 0),
    "llama-int8": (0, 10),
    "llama-head-int8": (0, 1),
    # fp8 for qkv, int8_sq for fc and gate; int8 for proj. dense is INT4.
    "llama-mixed": (6, 2),
    # Of 11 here two are the stacks of fc and gate: the scales of their experts, after the product, are fused too.
    "v3-stacks-fp8": (11, 0),
    "v3-stacks-int8_sq": (11, 0),
    "v3-stacks-int8": (0, 11),
}


LLAMA = ("mlp", "attention_input", "attention_output")
ROUTED = ("experts", "shared_experts", "mlp", "attention_output")
MIXED = (
    Override(pattern="*.dense", method="rtn"),
    Override(pattern="*.proj", method="int8"),
    Override(pattern="*.mlp.*", method="smoothquant"),
)
# What `plan` would be told of each.
RULES = {
    "llama-fp8": Rules(method="fp8", include=LLAMA),
    "llama-int8": Rules(method="int8", include=LLAMA),
    "llama-head-int8": Rules(
        method="rtn", include=LLAMA, group_size=32, recipe=(Override(pattern="lm_head", method="int8"),)
    ),
    "llama-int8_sq": Rules(method="smoothquant", include=LLAMA),
    "llama-mixed": Rules(method="fp8", include=LLAMA, group_size=32, recipe=MIXED),
    "v3-stacks-fp8": Rules(method="fp8", include=ROUTED),
    "v3-stacks-int8": Rules(method="int8", include=ROUTED),
    "v3-stacks-int8_sq": Rules(method="smoothquant", include=ROUTED),
}


def _check_eight_bit(model: str, kernels: Mapping[str, int], fusions: Mapping[str, int], held: Counter[str]) -> None:
    products, dequantized = EIGHT_BIT[model]
    assert fusions.get(EIGHT_BIT_GEMM, 0) == dequantized
    if products:
        # Their inputs are written as 8-bit numbers, and nothing dequantizes weights: there are GEMMs of both.
        assert held["fp8_e4m3" if "fp8" in model else "int8"] >= products - 2
        assert kernels["fully_connected"] + fusions.get("__myl_FcCastMulCast", 0) >= products


@slow
def test_fp8_is_refused_below_sm89_by_tensorrt_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="HW-specific datatypes: fp8_e4m3"):
        _build(tmp_path, "llama-fp8", "dense", "SM86")


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


@pytest.mark.parametrize(
    ("model", "moe", "sm", "sizes", "collectives"),
    [
        # The embedding, attention and the MLP of two layers; the head.
        ("llama-int4", "dense", "SM80", (2, 1, 1, 1), {"allreduce": 5, "allgather": 1}),
        # Of the one routed layer: experts' numbers, rows there, rows back.
        ("v3-ranks-int4", "dense", "SM80", (2, 1, 2, 1), {"allreduce": 5, "allgather": 1, "alltoall": 3}),
        pytest.param("v3-ranks-int4", "dense", "SM80", (4, 1, 2, 3), {"allreduce": 5, "alltoall": 3}, marks=slow),
        pytest.param("v2-fp16", "gather", "SM120", (4, 1, 4, 0), {"allreduce": 5, "alltoall": 3}, marks=slow),
        pytest.param("llama-fp16", "dense", "SM120", (2, 2, 1, 0), {"allreduce": 3}, marks=slow),
        pytest.param("llama-fp16", "dense", "SM86", (2, 2, 1, 3), {"allreduce": 2, "allgather": 1}, marks=slow),
    ],
)
def test_the_network_of_a_rank_builds(
    model: str, moe: str, sm: str, sizes: tuple[int, ...], collectives: dict[str, int], tmp_path: Path
) -> None:
    text = _build(tmp_path, model, moe, sm, *sizes).read_bytes()
    profiles = 1 if moe == "gather" else 2
    for name, count in collectives.items():
        assert text.count(f"comm_{name}={{".encode()) == count * profiles
