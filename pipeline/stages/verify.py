"""verify: proofs and quality gates. A failed gate stops the pipeline and leaves the report in `verify.failed`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.sharding.ranks import Parallel
from pipeline.stages.convert import model_source
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import PROOF, built_checkpoint, network_parameters, network_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config

SUMMARY = "verify.txt"


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    verify = config.stages.verify
    return {**model_source(config), "heldout": verify.heldout.files, "tasks": verify.tasks}


def _parameters(config: Config) -> Mapping[str, Any]:
    parameters = config.stages.verify.model_dump(mode="json")
    del parameters["heldout"]["files"], parameters["tasks"]  # their content counts, not their path
    return {**parameters, "network": network_parameters(config), "parallel": asdict(_ranks(config))}


def _ranks(config: Config) -> Parallel:
    """Of trtseek's own network; TensorRT-LLM shares models out by itself."""
    return Parallel() if config.target.world.foreign else config.target.parallel.sizes


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.gates import enforce
    from pipeline.evaluation.verification import verify

    converted = CheckpointFolder.open(context.inputs["convert"].path)
    quantized = CheckpointFolder.open(context.inputs["quantize"].path) if "quantize" in context.inputs else None
    built = CheckpointFolder.open(built_checkpoint(context.inputs))
    result = verify(
        CheckpointFolder.open(context.config.model.path),
        converted,
        quantized,
        network_spec(context.config, built.architecture.dtype),
        context.config.stages.verify,
        context.progress,
        parallel=_ranks(context.config),
        folder=context.workspace.path,
    )
    folder = context.workspace.path
    (folder / PROOF).write_text(json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / SUMMARY).write_text(result.summarize(), encoding="utf-8")
    for gate in result.gates:
        context.progress.note(gate.describe())
    enforce(result.gates, str(context.config.run_folder / "verify.failed" / SUMMARY))


STAGE = Stage(
    name="verify",
    version=5,
    run=_run,
    inputs=("convert", "quantize"),
    sources=_sources,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers", "tensorrt_rtx"),
)
