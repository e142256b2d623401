"""The runners that one set of tests holds for: the interpreter, an engine over the stand-in, an engine on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.program import Program
from pipeline.runtime.runner import InterpreterRunner
from tests.network.models import Model
from tests.runtime import stand_in

KINDS = ("interpreter", "engine", "gpu")
LIMITS = BuildLimits(
    max_seq_len=32,
    max_batch_size=4,
    max_num_tokens=32,
    generation=(Rectangle(batch=4, length=32),),
    block_size=8,
    max_blocks=16,
    max_chunk=16,
)


def make_runner(kind: str, model: Model, folder: Path) -> Any:
    """`model`: of float32, so that engine and exact mode hold the same types. Skips where there is no GPU for it."""
    if kind == "gpu":
        return build_for_gpu(model, folder)
    program: Program = model.program(max_seq_len=LIMITS.max_seq_len)
    if kind == "interpreter":
        return InterpreterRunner(program, mode="exact")
    return stand_in.load(model, program, LIMITS, folder)


def build_for_gpu(model: Model, folder: Path) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.builder import build_engine
    from pipeline.engine.tensorrt_rtx import TARGETS
    from pipeline.runtime.device import CudaDevice
    from pipeline.runtime.engine_runner import EngineRunner
    from pipeline.workspace import FolderWorkspace

    device = CudaDevice()
    source = CheckpointFolder.open(model.path)
    convert_checkpoint(source, FolderWorkspace(folder / "checkpoint"), dtype="float32", overflow="refuse")
    description = build_engine(
        backend="tensorrt_rtx" if device.sm in TARGETS else "tensorrt",
        checkpoint=folder / "checkpoint",
        spec=model.spec(max_seq_len=LIMITS.max_seq_len),
        limits=LIMITS,
        sm=device.sm,
        output=folder / "gpu" / "model.engine",
        log=folder / "build.log",
    )
    return EngineRunner(folder / "gpu" / "model.engine", description, device=device)
