"""What stands in for an engine of TensorRT-LLM in a rehearsal: the network of the checkpoint that it was built from,
run by the interpreter within the limits that the engine's config.json states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.errors import PackageError
from pipeline.triton.backend.loading import serve_on_host

if TYPE_CHECKING:
    from pipeline.engine.limits import BuildLimits
    from pipeline.engine.tensorrt_llm.engine_folder import EngineFolder
    from pipeline.triton.backend.loading import Loaded

CHECKPOINT, MODE = "TRTSEEK_REHEARSAL_CHECKPOINT", "TRTSEEK_REHEARSAL_MODE"


def describe_rehearsal(checkpoint: Path, mode: str) -> dict[str, str]:
    """The environment of a server that rehearses: the engine checkpoint, and the interpreter's arithmetic."""
    return {CHECKPOINT: str(checkpoint.resolve()), MODE: mode}


def load_rehearsal(parameters: Mapping[str, str]) -> Loaded:
    """Of a model whose parameters are TensorRT-LLM's. Raises PackageError outside a rehearsal, BuildError where the
    engine's folder is damaged."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
    from pipeline.evaluation.forward import read_program
    from pipeline.network.spec import NetworkSpec
    from pipeline.runtime.runner import InterpreterRunner

    if CHECKPOINT not in os.environ:
        raise PackageError(
            f"backend tensorrtllm is NVIDIA's, and this stands in for it in rehearsals alone: {CHECKPOINT} is not set",
            hint="run the repository in NVIDIA's image (launch.sh), or rehearse it with `trtseek serve --rehearse`",
        )
    engine = read_engine_folder(Path(parameters["gpt_model_path"]))
    checkpoint = CheckpointFolder.open(Path(os.environ[CHECKPOINT]))
    limits = read_limits(engine)
    spec = NetworkSpec(
        dtype=checkpoint.architecture.dtype, max_seq_len=limits.max_seq_len, block_size=limits.block_size
    )
    runner = InterpreterRunner(
        read_program(checkpoint, checkpoint.architecture, spec), mode=cast("Any", os.environ[MODE])
    )
    tokens = parameters.get("max_tokens_in_paged_kv_cache")
    return serve_on_host(
        runner,
        checkpoint.architecture,
        [spec],
        limits,
        mode=os.environ[MODE],
        blocks=limits.max_blocks if tokens is None else 1 + int(tokens) // limits.block_size,
    )


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
