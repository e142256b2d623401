"""Engines that several tests look at, built once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.config.settings import Quantize
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.spec import NetworkSpec
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.engine.checkpoints import TINY_LLAMA, TINY_MOE, TINY_V2, write_engine_checkpoint

LLAMA_INT4 = ("attention_input", "attention_output", "mlp")
MOE_INT4 = (*LLAMA_INT4, "experts", "shared_experts")
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
def moe_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("moe"), TINY_MOE, MOE_INT4, LIMITS)


@pytest.fixture(scope="session")
def v2_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("v2"), TINY_V2, V2_INT4, LIMITS)


MADE_BLOCKS = Quantize(method="fp8_blocks")
# Experts and pages that are large beside everything else, so that a matrix too many alive would show.
FP8_LIMITS = BuildLimits(
    max_seq_len=256,
    max_batch_size=8,
    max_num_tokens=256,
    generation=(Rectangle(batch=8, length=256),),
    max_blocks=100,
    max_chunk=64,
)


@pytest.fixture(scope="session")
def fp8_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """In FP8 blocks that the engine keeps from its source."""
    folder = tmp_path_factory.mktemp("fp8")
    return _build_v3(folder, _convert_v3(folder, fp8=True))


@pytest.fixture(scope="session")
def made_blocks_engine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """In FP8 blocks that method fp8_blocks made, of its own roles only."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.quantize import quantize_checkpoint

    folder = tmp_path_factory.mktemp("blocks")
    converted = CheckpointFolder.open(_convert_v3(folder, fp8=False))
    quantize_checkpoint(converted, FolderWorkspace(folder / "checkpoint"), settings=MADE_BLOCKS)
    return _build_v3(folder, folder / "checkpoint")


def _convert_v3(folder: Path, *, fp8: bool) -> Path:
    """DeepSeek-V3, one dense layer, two routed ones → its engine checkpoint."""
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder

    source = fixtures.deepseek_v3(
        folder / "source",
        fp8=fp8,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        n_routed_experts=48,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=384,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_hidden_layers=3,
        num_nextn_predict_layers=0,
        first_k_dense_replace=1,
    )
    checkpoint = folder / ("checkpoint" if fp8 else "converted")
    convert_checkpoint(CheckpointFolder.open(source), FolderWorkspace(checkpoint), dtype=None, overflow="refuse")
    return checkpoint


def _build_v3(folder: Path, checkpoint: Path) -> Built:
    """For SM89."""
    from pipeline.checkpoint.folder import CheckpointFolder

    return build(folder, CheckpointFolder.open(checkpoint).config, (), FP8_LIMITS, sm=89)
