"""build for the backends whose network is TensorRT-LLM's: an engine by way of the job, or a checkpoint to be loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError, PendingError
from pipeline.stages.network import built_checkpoint, proved_digests

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.stages.graph import StageContext

CHECKPOINT = "checkpoint"  # of llmapi: the Hugging Face folder within the stage's output
EXPORT_VERSION = 2  # of llmapi: goes up whenever the same checkpoint would be exported as other bytes


def build_tensorrt_llm(context: StageContext) -> None:
    """Builds where trtllm-build and the GPU are; PendingError elsewhere, since the job is ready by then."""
    from pipeline.engine.tensorrt_llm.builder import build_engine, list_lacks
    from pipeline.engine.tensorrt_llm.job import read_request

    job = context.inputs["job"].path
    request = read_request(job)
    if lacks := list_lacks(request):
        raise PendingError(
            f"the engine is not built yet: this host has not {' nor '.join(lacks)}",
            hint=f"{context.config.run_folder / 'job'} is a job for a host that has",
        )
    build_engine(job, context.workspace.path, request, proved_digests(context.inputs)[0], context.progress)


def take_tensorrt_llm(engine: Path) -> Callable[[StageContext], None]:
    """The build stage's work where the engine was built elsewhere, by the job."""
    return partial(_take, engine=engine)


def _take(context: StageContext, *, engine: Path) -> None:
    from pipeline.engine.tensorrt_llm.builder import take_engine
    from pipeline.engine.tensorrt_llm.job import read_request

    job = context.inputs["job"].path
    context.progress.note(f"takes {engine}, if it is what was asked")
    digest = proved_digests(context.inputs)[0]
    take_engine(engine, job, context.workspace.path, read_request(job), digest, context.progress)


def export_llmapi(context: StageContext) -> None:
    """The checkpoint that the PyTorch backend loads, in the layout in which it reads its quantized linears."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.exports.formats import export_checkpoint

    source = CheckpointFolder.open(built_checkpoint(context.inputs))
    report = export_checkpoint(
        source, context.workspace.path / CHECKPOINT, _choose_format(source), progress=context.progress
    )
    for note in report.notes:
        context.progress.note(note)


def _choose_format(engine: CheckpointFolder) -> str:
    from pipeline.checkpoint.layouts.scales import find_format
    from pipeline.config.backends import FOREIGN_LLMAPI_EXPORTS, LLMAPI_EXPORTS

    exports = LLMAPI_EXPORTS | FOREIGN_LLMAPI_EXPORTS
    names = (name.removesuffix(".weight") for name in engine.tensors if name.endswith(".weight"))
    formats = {form for name in names if (form := find_format(engine.tensors, name))}
    wanted = {exports.get(form, "") for form in formats} or {"hf"}
    if len(wanted) > 1 or "" in wanted:
        raise CompatibilityError(
            f"{engine.path}: its linears are in {', '.join(sorted(formats))}, which TensorRT-LLM's PyTorch backend "
            "does not read, or not in one checkpoint",
            hint="quantize to awq, fp8 or fp8_blocks, or take target.backend: tensorrt_llm",
        )
    return wanted.pop()
