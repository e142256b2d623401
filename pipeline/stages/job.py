"""job: rank checkpoints and all else that building an engine of TensorRT-LLM takes, wherever that is done.

Only backend tensorrt_llm has it. What it makes is copied as it is to a host that can build (`build` does so itself
where this one can).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import built_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.schema import Config
    from pipeline.progress import Progress

BACKEND = "tensorrt_llm"


def _applies(config: Config) -> bool:
    return config.target.backend == BACKEND


def _parameters(config: Config) -> Mapping[str, Any]:
    """All that a request is made of, but for the checkpoint, which is an input."""
    from pipeline.engine.tensorrt_llm.request import make_request

    return {"name": config.name, "request": make_request(config).to_json()}


def _run(context: StageContext) -> None:
    from dataclasses import replace

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.tensorrt_llm.job import CHECKPOINT, write_job
    from pipeline.engine.tensorrt_llm.ranks import write_ranks
    from pipeline.engine.tensorrt_llm.request import make_request
    from pipeline.workspace import NestedWorkspace

    config, folder, progress = context.config, context.workspace.path, context.progress
    source = CheckpointFolder.open(built_checkpoint(context.inputs))
    report = write_ranks(
        source,
        NestedWorkspace(context.workspace, CHECKPOINT),
        parallel=config.target.parallel.sizes,
        sm=config.target.device.sm,
        progress=progress,
    )
    _prove(source, folder / CHECKPOINT, config.target.device.sm, progress)
    request = make_request(config, report.quant_algo)
    if report.unfused_mlp and config.stages.build.tensorrt_llm.use_fused_mlp is None:
        request = replace(request, use_fused_mlp=False)
        progress.note("the halves of the gated MLP have scales of their own: not fused, which would round one again")
    progress.start("sum up", report.nbytes, "B")
    write_job(folder, request, name=config.name, on_bytes=progress.advance)


def _prove(source: CheckpointFolder, ranks: Path, sm: int, progress: Progress) -> None:
    """By a reader that knows TensorRT-LLM's layout alone: before anybody waits for an engine of it."""
    from pipeline.errors import BuildError
    from pipeline.evaluation.rank_proof import prove_ranks

    proof = prove_ranks(ranks, source, sm=sm, progress=progress)
    if not proof.holds:
        raise BuildError(
            f"{ranks}: the ranks together are not the model that was proved: {len(proof.differing)} tensors differ "
            f"(first: {', '.join(list(proof.differing)[:3])})",
            hint="a fault of trtseek itself, or of the disk: run again with --force job, and report it",
        )
    progress.note(
        f"{proof.ranks} rank(s) hold all {proof.tensors} tensors, {len(proof.rounded)} of them rounded once more, as "
        f"TensorRT-LLM's layout asks; over {proof.tokens} tokens logits differ by {proof.logits:.2g} of their size"
    )


STAGE = Stage(
    name="job",
    version=2,
    run=_run,
    inputs=("convert", "quantize"),
    parameters=_parameters,
    libraries=("torch", "safetensors"),
    applies=_applies,
)
