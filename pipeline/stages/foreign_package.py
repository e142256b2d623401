"""package for the backends whose network is TensorRT-LLM's: what NVIDIA's image is to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.stages.foreign_build import CHECKPOINT
from pipeline.stages.network import built_checkpoint, proved_digests

if TYPE_CHECKING:
    from pipeline.release.manifest import Built
    from pipeline.stages.graph import StageContext


def package_tensorrt_llm(context: StageContext) -> Built:
    """The engines, and the five models for TensorRT-LLM's C++ backend."""
    from pipeline.digest import digest_file, digest_json
    from pipeline.engine.tensorrt_llm.record import ENGINE, load_record
    from pipeline.release.manifest import Built
    from pipeline.triton.tensorrtllm.repository import emit_repository

    build = context.inputs["build"].path
    emit_repository(
        context.workspace.path,
        config=context.config,
        build=build,
        checkpoint=built_checkpoint(context.inputs),
        on_link=context.workspace.recognise,
        progress=context.progress,
    )
    record = load_record(build)
    return Built(
        backend="tensorrt_llm",
        backend_version=record.version,
        sm=record.sm,
        digest=digest_json({name: digest_file(build / ENGINE / name) for name in sorted(record.files)}),
        networks=[record.network_digest],
    )


def package_llmapi(context: StageContext) -> Built:
    """The checkpoint, and what TensorRT-LLM's LLM API is told. Which release loads it is for whoever serves it."""
    from pipeline.release.manifest import Built
    from pipeline.triton.llmapi.repository import emit_repository

    emit_repository(
        context.workspace.path,
        config=context.config,
        checkpoint=context.inputs["build"].path / CHECKPOINT,
        on_link=context.workspace.recognise,
        progress=context.progress,
    )
    networks = proved_digests(context.inputs)
    return Built(backend="llmapi", backend_version=None, sm=None, digest=None, networks=networks)
