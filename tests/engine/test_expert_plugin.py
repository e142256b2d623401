"""Engines whose routed experts are a plugin: INT4 for SM80, FP8 blocks for SM89, weights inside or to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.builder import build_engine
from pipeline.engine.description import load_description
from pipeline.engine.kernels import plan_workspace
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.refit_list import REFIT_LIST, load_refit_list
from pipeline.engine.weights import FP8_ROLES
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.engine.checkpoints import TINY_V2, write_engine_checkpoint

LIMITS = BuildLimits(
    max_seq_len=256,
    max_batch_size=8,
    max_num_tokens=512,
    generation=(Rectangle(batch=8, length=256),),
    max_blocks=40,
    max_chunk=64,
)
# Rows of experts that are large beside everything else.
WIDE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts_per_tok": 8, "num_hidden_layers": 2}
KERNELS = ["group_pairs", "multiply", "multiply", "multiply", "multiply", "combine"]


def build(folder: Path, checkpoint: Path, sm: int, **options: Any) -> Path:
    source = CheckpointFolder.open(checkpoint)
    spec = NetworkSpec(
        dtype=source.architecture.dtype,
        max_seq_len=LIMITS.max_seq_len,
        block_size=LIMITS.block_size,
        lowering=Lowering(moe_experts="plugin"),
    )
    output = folder / "model.engine"
    build_engine(
        backend="tensorrt_rtx", checkpoint=checkpoint, spec=spec, limits=LIMITS, sm=sm, output=output,
        log=folder / "build.log", **options,
    )  # fmt: skip
    return output


def write_int4(folder: Path) -> Path:
    return write_engine_checkpoint(folder / "int4", TINY_V2 | WIDE, int4=("experts", "shared_experts"), group=64)


def convert_fp8(folder: Path) -> Path:
    hub = fixtures.deepseek_v3(folder / "hf", fp8=True, **WIDE)
    convert_checkpoint(CheckpointFolder.open(hub), FolderWorkspace(folder / "blocks"), dtype=None, overflow="refuse")
    return folder / "blocks"


@pytest.mark.parametrize(
    ("write", "sm"),
    [(write_int4, 80), pytest.param(write_int4, 89, marks=pytest.mark.slow), (convert_fp8, 89)],
    ids=["int4-80", "int4-89", "fp8_blocks-89"],
)
def test_an_engine_carries_its_experts(write: Any, sm: int, tmp_path: Path) -> None:
    path = build(tmp_path, write(tmp_path), sm)
    description, data = load_description(tmp_path), path.read_bytes()
    assert description.spec.lowering.moe_experts == "plugin"
    (plugin,) = description.plugins
    assert (plugin.operation, plugin.layers) == ("moe_experts", 1)
    assert [kernel.function for kernel in plugin.kernels] == KERNELS
    for kernel in plugin.kernels:
        assert (kernel.sm, kernel.spills) == (sm, 0)
        assert b".entry " + kernel.function.encode() in data
    architecture = CheckpointFolder.open(tmp_path / ("int4" if write is write_int4 else "blocks")).architecture
    for profile, stated in zip(LIMITS.profiles(), description.profiles, strict=True):
        planned = plan_workspace(
            architecture, profile, dtype=architecture.dtype, block_size=LIMITS.block_size, moe="dense",
            blocks=frozenset(FP8_ROLES if write is convert_fp8 else ()), lowering=Lowering(moe_experts="plugin"),
        )  # fmt: skip
        assert stated.workspace_bytes is not None
        assert 1 <= planned.nbytes / stated.workspace_bytes <= 1.1, planned.terms[:8]
        assert planned.terms[0][0] == "experts_workspace" or profile.phase == "generation"


@pytest.mark.slow
def test_experts_weights_may_come_later(tmp_path: Path) -> None:
    """As the checkpoint's own bytes: packed INT4 and its scales, by name."""
    path = build(tmp_path, write_int4(tmp_path), 80, weights="stripped")
    names = {constant.name for constant in load_refit_list(path.with_name(REFIT_LIST)).constants}
    experts = {name for name in names if name.startswith("layers.1.mlp.experts.")}
    kinds = {f"layers.1.mlp.experts.{name}" for name in ("fc", "gate", "proj")}
    assert experts == {f"{name}.{kind}" for name in kinds for kind in ("weight", "weights_scaling_factor")}
