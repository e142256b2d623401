"""prove: what was converted, compiled and lost is measured, at length.

The bounds that `verify` judges it by are no part of it: others are judged at once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.sharding.ranks import Parallel
from pipeline.stages.convert import model_source
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import built_checkpoint, network_parameters, network_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config


def _sources(config: Config) -> Mapping[str, Sequence[Path]]:
    verify = config.stages.verify
    return {**model_source(config), "heldout": verify.heldout.files, "tasks": verify.tasks}


def _parameters(config: Config) -> Mapping[str, Any]:
    parameters = config.stages.verify.model_dump(mode="json", exclude={"gates"})
    del parameters["heldout"]["files"], parameters["tasks"]  # their content counts, not their path
    return {**parameters, "network": network_parameters(config), "parallel": asdict(_ranks(config))}


def _ranks(config: Config) -> Parallel:
    """Of trtseek's own network; TensorRT-LLM shares models out by itself."""
    return Parallel() if config.target.world.foreign else config.target.parallel.sizes


def _run(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.proofs import prove

    built = CheckpointFolder.open(built_checkpoint(context.inputs))
    prove(
        CheckpointFolder.open(context.config.model.path),
        CheckpointFolder.open(context.inputs["convert"].path),
        built if "quantize" in context.inputs else None,
        network_spec(context.config, built.architecture.dtype),
        context.config.stages.verify,
        context.workspace,
        context.progress,
        parallel=_ranks(context.config),
    )


STAGE = Stage(
    name="prove",
    version=1,
    run=_run,
    inputs=("convert", "quantize"),
    sources=_sources,
    parameters=_parameters,
    libraries=("torch", "transformers", "tokenizers", "tensorrt_rtx"),
)
