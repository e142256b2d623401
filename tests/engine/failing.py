"""A build that fails in a chosen way. Light to import: some tests run it in a process of its own."""

from __future__ import annotations

from pathlib import Path

from pipeline.engine.builder import build_engine
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.spec import NetworkSpec

SMALL = BuildLimits(
    max_seq_len=128,
    max_batch_size=2,
    max_num_tokens=32,
    generation=(Rectangle(batch=2, length=128),),
    block_size=32,
    max_blocks=16,
)


def fail(folder: Path, factory: str, *, log: str = "build.log") -> None:
    """Builds the checkpoint in `folder` by a factory of factories.py."""
    build_engine(
        backend="tensorrt_rtx",
        checkpoint=folder / "checkpoint",
        spec=NetworkSpec(dtype="float16", max_seq_len=128, block_size=32),
        limits=SMALL,
        sm=80,
        output=folder / factory / "model.engine",
        log=folder / log,
        factory=f"tests.engine.factories:{factory}",
    )
