"""What serving a package on this host takes of its memory: estimated from what is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.triton.backend.belonging import describe
from pipeline.triton.backend.loading import count_wanted, pick_runner
from pipeline.triton.backend.rehearsal import plan_rehearsal
from pipeline.triton.model_config import EXECUTOR
from pipeline.triton.package import Package, Rehearsal, read_configs, read_parameters
from pipeline.triton.serving_memory import Model, Part, list_parts, measure_model


def estimate_memory(package: Package, rehearsal: Rehearsal | None = None) -> tuple[Part, ...]:
    """`rehearsal`: what stands in for an engine of TensorRT-LLM's. Raises PackageError, CheckpointError or BuildError
    where the package's files cannot be read."""
    configs = read_configs(package.repository)
    return list_parts(count_processes(configs), _describe_model(package, read_parameters(configs[EXECUTOR]), rehearsal))


def count_processes(configs: Mapping[str, Any]) -> dict[str, int]:
    """Processes by model, from ModelConfigs by name: one for each instance; of an ensemble of Triton's, none."""
    return {
        name: sum(group.count or 1 for group in config.instance_group) or 1
        for name, config in configs.items()
        if config.platform != "ensemble"
    }


def _describe_model(package: Package, parameters: Mapping[str, str], rehearsal: Rehearsal | None) -> Model:
    folder = package.repository / EXECUTOR
    checkpoint = CheckpointFolder.open(
        (folder / parameters["checkpoint_path"]).resolve() if rehearsal is None else rehearsal.checkpoint
    )
    architecture = checkpoint.architecture
    if rehearsal is None:
        if pick_runner(parameters.get("runner", "auto")) == "engine":
            return Model(vocab_size=architecture.vocab_size)
        description, mode = describe(folder, parameters), parameters.get("interpreter_mode", "fast")
        specs, limits = [rank.spec for rank in description.all_ranks], description.limits
        wanted = count_wanted(limits, parameters)
    else:
        mode = rehearsal.mode
        spec, limits, wanted = plan_rehearsal(package.folder / parameters["gpt_model_path"], parameters, architecture)
        specs = [spec]
    nbytes = sum(file.stat().st_size for file in checkpoint.files if file.suffix == ".safetensors")
    return measure_model(architecture, specs, limits, wanted, mode, nbytes)
