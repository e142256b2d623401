"""What stands in for an engine of TensorRT-LLM in a rehearsal: the network of the checkpoint that it was built from,
run by the interpreter within the limits that the engine's config.json states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.errors import PackageError
from pipeline.triton.backend.loading import count_wanted, serve_on_host

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.engine.limits import BuildLimits
    from pipeline.engine.tensorrt_llm.engine_folder import EngineFolder
    from pipeline.network.spec import NetworkSpec
    from pipeline.triton.backend.loading import Loaded

CHECKPOINT, MODE = "TRTSEEK_REHEARSAL_CHECKPOINT", "TRTSEEK_REHEARSAL_MODE"


def describe_rehearsal(checkpoint: Path, mode: str) -> dict[str, str]:
    """The environment of a server that rehearses: the engine checkpoint, and the interpreter's arithmetic."""
    return {CHECKPOINT: str(checkpoint.resolve()), MODE: mode}


def load_rehearsal(parameters: Mapping[str, str]) -> Loaded:
    """Of a model whose parameters are TensorRT-LLM's. Raises PackageError outside a rehearsal, BuildError where the
    engine's folder is damaged."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.forward import read_program
    from pipeline.runtime.runner import InterpreterRunner

    if CHECKPOINT not in os.environ:
        raise PackageError(
            f"backend tensorrtllm is NVIDIA's, and this stands in for it in rehearsals alone: {CHECKPOINT} is not set",
            hint="run the repository in NVIDIA's image (launch.sh), or rehearse it with `trtseek serve --rehearse`",
        )
    checkpoint = CheckpointFolder.open(Path(os.environ[CHECKPOINT]))
    spec, limits, blocks = plan_rehearsal(Path(parameters["gpt_model_path"]), parameters, checkpoint.architecture)
    runner = InterpreterRunner(
        read_program(checkpoint, checkpoint.architecture, spec), mode=cast("Any", os.environ[MODE])
    )
    return serve_on_host(runner, checkpoint.architecture, [spec], limits, mode=os.environ[MODE], blocks=blocks)


def plan_rehearsal(
    engine: Path, parameters: Mapping[str, str], architecture: Architecture
) -> tuple[NetworkSpec, BuildLimits, int]:
    """The network that stands in for the engine in this folder, its limits, and how many KV blocks it is to have."""
    from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
    from pipeline.network.spec import NetworkSpec

    limits = read_limits(read_engine_folder(engine))
    spec = NetworkSpec(dtype=architecture.dtype, max_seq_len=limits.max_seq_len, block_size=limits.block_size)
    return spec, limits, count_wanted(limits, parameters)


def read_limits(engine: EngineFolder) -> BuildLimits:
    """What an engine of TensorRT-LLM holds, as limits of ours. Raises CompatibilityError where they contradict each
    other."""
    from pipeline.engine.limits import BuildLimits, Rectangle

    build = engine.config["build_config"]
    batch, length, block = build["max_batch_size"], build["max_seq_len"], build["plugin_config"]["tokens_per_block"]
    return BuildLimits(
        max_seq_len=length,
        max_batch_size=batch,
        max_num_tokens=build["max_num_tokens"],
        generation=(Rectangle(batch=batch, length=length),),
        block_size=block,
        max_blocks=1 + batch * -(-length // block),
    )
