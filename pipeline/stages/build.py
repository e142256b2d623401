"""build: a TensorRT engine from the proven network; for TensorRT-LLM's backends, what foreign_build says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.stages.foreign_build import EXPORT_VERSION, build_tensorrt_llm, export_llmapi
from pipeline.stages.graph import Stage, StageContext
from pipeline.stages.network import NETWORK_FILE, built_checkpoint, network_spec, proved_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.engine.description import EngineDescription
    from pipeline.network.spec import NetworkSpec

ENGINE = "model.engine"
LOG = "build.log"


def _parameters(config: Config) -> Mapping[str, Any]:
    """With its plugins' own code, which goes into the engine: an edited one is another engine. What is asked of
    trtllm-build is the job's, an input; a checkpoint that is loaded as it is has none of these."""
    from plugins.passed import digest_plugin

    if config.target.world.foreign:
        return {"export": EXPORT_VERSION} if config.target.backend == "llmapi" else {}
    parameters = config.stages.build.model_dump(mode="json", exclude={"tensorrt_llm"})
    plugins = [name for name, lowering in parameters["lowering"].items() if lowering == "plugin"]
    return {**parameters, "plugins": {name: digest_plugin(name) for name in plugins}}


def _target(config: Config) -> Any:
    return {"backend": config.target.backend, "sm": config.target.device.sm}


def _run(context: StageContext) -> None:
    RUNS[context.config.target.backend](context)


def _build_own(context: StageContext) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.builder import build_engine
    from pipeline.engine.rank_engines import build_ranks
    from pipeline.errors import BuildError

    config, folder = context.config, context.workspace.path
    checkpoint = built_checkpoint(context.inputs)
    spec = network_spec(config, CheckpointFolder.open(checkpoint).architecture.dtype)
    parallel = config.target.parallel.sizes

    def build(spec: NetworkSpec, place: Path) -> EngineDescription:
        if parallel.world > 1:
            context.progress.note(f"rank {spec.rank.index} of {parallel.world}")
        return build_engine(
            backend=config.target.backend,
            checkpoint=checkpoint,
            spec=spec,
            limits=config.stages.build.limits(),
            sm=config.target.device.sm,
            output=place / ENGINE,
            log=folder / LOG,
            progress=context.progress,
            weights=config.stages.build.weights,
            weight_streaming=config.stages.build.weight_streaming,
        )

    engine = build(spec, folder) if parallel.world == 1 else build_ranks(parallel, spec, context.workspace, build)
    built, proven = [rank.network_digest for rank in engine.all_ranks], proved_digests(context.inputs)
    if built != proven:
        raise BuildError(
            f"the network that was built ({', '.join(built)}) is not the one that was proved ({', '.join(proven)})",
            hint="the code changed between the stages: run with --force prove --force build",
        )
    network = {"spec": json.loads(spec.to_json()), "digest": engine.network_digest}
    (folder / NETWORK_FILE).write_text(json.dumps(network, indent=2) + "\n", encoding="utf-8")


RUNS: Mapping[str, Callable[[StageContext], None]] = {
    "tensorrt_rtx": _build_own,
    "tensorrt": _build_own,
    "tensorrt_llm": build_tensorrt_llm,
    "llmapi": export_llmapi,
}
STAGE = Stage(
    name="build",
    version=1,
    run=_run,
    inputs=("convert", "quantize", "prove", "job"),
    parameters=_parameters,
    libraries=("tensorrt_rtx", "tensorrt", "triton"),
    target=_target,
    reproducible=False,
)
