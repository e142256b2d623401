"""Engines that several tests look at, built once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.spec import NetworkSpec
from tests.engine.checkpoints import TINY_LLAMA, TINY_V2, write_engine_checkpoint

LLAMA_INT4 = ("attention_input", "attention_output", "mlp")
V2_INT4 = ("mlp", "experts", "shared_experts")


class Built(NamedTuple):
    """An engine, and everything that it came from."""

    path: Path
    log: Path
    checkpoint: Path
    architecture: Architecture
    limits: BuildLimits
    spec: NetworkSpec
    description: EngineDescription


def build(
    folder: Path, config: dict[str, Any], int4: tuple[str, ...], limits: BuildLimits, *, sm: int = 80, **options: Any
) -> Built:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_engine_checkpoint(checkpoint, config, int4=int4, group=64)
    spec = NetworkSpec(dtype=config["torch_dtype"], max_seq_len=limits.max_seq_len, block_size=limits.block_size)
    output, log = folder / f"sm{sm}" / "model.engine", folder / "build.log"
    description = build_engine(
        backend="tensorrt_rtx",
        checkpoint=checkpoint,
        spec=spec,
        limits=limits,
        sm=sm,
        output=output,
        log=log,
        **options,
    )
    return Built(output, log, checkpoint, parse_architecture(config), limits, spec, description)


# Long enough that the gathered pages outgrow the GEMMs' scratch memory, whose size does not depend on the model.
LIMITS = BuildLimits(
    max_seq_len=4096,
    max_batch_size=32,
    max_num_tokens=256,
    generation=(Rectangle(batch=32, length=1024), Rectangle(batch=8, length=4096)),
    max_blocks=600,
    max_chunk=64,
)


@pytest.fixture(scope="session")
def llama_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("llama"), TINY_LLAMA, LLAMA_INT4, LIMITS)


@pytest.fixture(scope="session")
def v2_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("v2"), TINY_V2, V2_INT4, LIMITS)
