"""Emits a Triton model repository of flavour `trtseek`, and beside it what its models need.

    model_repository/  the five models: config.pbtxt and their own code
    backends/trtseek/  the Python-based backend that `tensorrt_llm` names
    artifacts/         engine-…, checkpoint-…, tokenizer-…: folders named after their content's digest

Artifacts are hard links into the store, so a package of 100 GB costs no 100 GB. They stand beside the repository, not
in it, because Triton takes every folder of a repository for a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_file
from pipeline.errors import BuildError, PackageError, spell_reason
from pipeline.progress import SILENT, Progress
from pipeline.triton import MODEL_REPO
from pipeline.triton.backend.belonging import FORMAT
from pipeline.triton.emission import (
    ARTIFACTS,
    BACKENDS,
    BY_SOCKET,
    REPOSITORY,
    Linker,
    by_name,
    list_modules,
    open_with_tokenizer,
    write_models,
)
from pipeline.triton.lint import check_repository
from pipeline.triton.model_config import Models, build_configs, count_instances, text_parameters

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.engine.description import EngineDescription


# Requests of tensorrt_llm_bls that wait for tokens at a time; more than that wait for one of them to end.
MAX_STREAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the models find their files, relative to each model's own folder, so that a release can be moved."""

    engine: str
    checkpoint: str
    network: str
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """An emitted repository. `path` is the folder to give to tritonserver as its model repository."""

    path: Path
    backends: Path
    network_digest: str
    artifacts: Mapping[str, Path]  # engine, checkpoint, tokenizer


def emit_repository(
    output: Path,
    *,
    config: Config,
    engine: Path,
    checkpoint: Path,
    network: Path,
    on_link: Callable[[Path, str], object] = lambda file, digest: None,
    progress: Progress = SILENT,
) -> Repository:
    """Writes the repository into the folder `output` and lints it.

    `engine` is the build's folder (engine.json and the file it names), `checkpoint` the engine checkpoint that was
    built, `network` its network.json. `on_link` is told of every file linked or copied, with its digest. Raises
    PackageError where the three do not belong together, and for whatever `lint` finds.
    """
    description = _read_description(engine)
    digest = _check_belonging(description, checkpoint, _read_json(network), network)
    files = _list_files(description, engine, checkpoint, network)
    linker = Linker(output / ARTIFACTS, on_link, progress)
    nbytes = sum(file.stat().st_size for group in files.values() for file in group.values())
    progress.start("package", nbytes, "B")
    artifacts = {kind: linker.link_folder(kind, group) for kind, group in files.items()}
    folders = {kind: f"../../{ARTIFACTS}/{folder.name}" for kind, folder in artifacts.items()}
    paths = Paths(**folders, network=f"{folders['checkpoint']}/{network.name}")
    models = describe_models(config, paths, network_digest=digest, engine_digest=description.set_digest)
    modules = list_modules(BY_SOCKET)
    write_models(output / REPOSITORY, build_own_configs(models), modules | {"ensemble": modules["tensorrt_llm_bls"]})
    shutil.copytree(MODEL_REPO / "backends", output / BACKENDS, ignore=shutil.ignore_patterns("__pycache__"))
    check_repository(output / REPOSITORY, backends=output / BACKENDS)
    return Repository(path=output / REPOSITORY, backends=output / BACKENDS, network_digest=digest, artifacts=artifacts)


def describe_models(config: Config, paths: Paths, *, network_digest: str, engine_digest: str) -> Models:
    """What the models are told of a config. Keys that TensorRT-LLM's backend has keep their names and meanings; those
    after FORCE_CPU_ONLY are ours."""
    build, package = config.stages.build, config.stages.package
    executor = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": paths.engine,
        "tokenizer_dir": paths.tokenizer,
        "max_beam_width": 1,
        "kv_cache_free_gpu_mem_fraction": package.kv_cache_free_gpu_mem_fraction,
        "max_tokens_in_paged_kv_cache": package.max_tokens_in_paged_kv_cache,
        "batch_scheduler_policy": package.batch_scheduler_policy,
        "enable_kv_cache_reuse": package.enable_kv_cache_reuse,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",  # the executor plans its steps on the host
        "package_format": FORMAT,
        "checkpoint_path": paths.checkpoint,
        "network_path": paths.network,
        "network_digest": network_digest,
        "engine_digest": engine_digest,
        "max_seq_len": build.max_seq_len,
        "max_num_tokens": build.max_num_tokens,
        "block_size": build.block_size,
        "max_queue_size": package.max_queue_size,
        "runner": package.runner,
        "interpreter_mode": package.interpreter_mode,
    }
    text = text_parameters(config, paths.tokenizer, max_streams=MAX_STREAMS)
    return Models(
        max_batch_size=build.max_batch_size,
        max_queue_size=package.max_queue_size,
        parameters={**text, "ensemble": text["tensorrt_llm_bls"], "tensorrt_llm": executor},
        instances=count_instances(config),
    )


def build_own_configs(models: Models) -> dict[str, Any]:
    """This flavour's ModelConfigs. Its `ensemble` has an ensemble's tensors, with output_ids, and is none: the code of
    tensorrt_llm_bls by another name, as Triton passes no cancellation on to an ensemble's steps."""
    configs = build_configs(models)
    ensemble = configs["ensemble"]
    ensemble.ClearField("platform")
    ensemble.ClearField("ensemble_scheduling")
    ensemble.backend = configs["tensorrt_llm_bls"].backend
    ensemble.model_transaction_policy.CopyFrom(configs["tensorrt_llm_bls"].model_transaction_policy)
    ensemble.output.extend(output for output in configs["tensorrt_llm_bls"].output if output.name == "output_ids")
    return configs


def _check_belonging(description: EngineDescription, checkpoint: Path, network: dict[str, Any], origin: Path) -> str:
    """The network's digest, once engine, network and checkpoint agree on it."""
    if network.get("digest") != description.network_digest:
        raise PackageError(
            f"{origin} is of network {network.get('digest')}, the engine of {description.network_digest}",
            hint="build the engine again",
        )
    for name, expected in description.sources.items():
        file = checkpoint / name
        if not file.is_file():
            raise PackageError(f"{file} is missing, and the engine was built from it", hint="run quantize again")
        if digest_file(file) != expected:
            raise PackageError(f"{file} is not the one the engine was built from", hint="build the engine again")
    return description.network_digest


def _list_files(
    description: EngineDescription, engine: Path, checkpoint: Path, network: Path
) -> dict[str, dict[str, Path]]:
    from pipeline.engine.description import DESCRIPTION
    from pipeline.engine.limits import STRIPPED

    folder = open_with_tokenizer(checkpoint)
    names = [DESCRIPTION]
    for rank in description.all_ranks:
        place = PurePath(rank.file).parent
        names += [rank.file, *([str(place / DESCRIPTION)] if description.ranks else [])]
        if description.weights == STRIPPED:
            names.append(str(place / "refit.json"))  # what it lacks
    return {
        "engine": {name: engine / name for name in names},
        "checkpoint": by_name([*folder.files, network]),
        "tokenizer": by_name(folder.tokenizer_files),
    }


def _read_description(engine: Path) -> EngineDescription:
    from pipeline.engine.description import DESCRIPTION, load_description

    try:
        return load_description(engine / DESCRIPTION)
    except BuildError as error:
        raise PackageError(error.message, hint=error.hint) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackageError(f"{path}: {spell_reason(error)}", hint="run the build stage again") from error
    if not isinstance(value, dict):
        raise PackageError(f"{path}: does not hold a JSON object", hint="run the build stage again")
    return value
