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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_file
from pipeline.errors import BuildError, PackageError
from pipeline.progress import SILENT, Progress
from pipeline.triton import MODEL_REPO
from pipeline.triton.emission import ARTIFACTS, BACKENDS, REPOSITORY, Linker, list_modules, write_models
from pipeline.triton.lint import check_repository
from pipeline.triton.model_config import Paths, RepositorySettings, build_configs

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.engine.description import EngineDescription


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
    progress.start("package", sum(file.stat().st_size for group in files.values() for file in group), "B")
    artifacts = {kind: linker.link_folder(kind, group) for kind, group in files.items()}
    folders = {kind: f"../../{ARTIFACTS}/{folder.name}" for kind, folder in artifacts.items()}
    paths = Paths(**folders, network=f"{folders['checkpoint']}/{network.name}")
    settings = make_settings(config, network_digest=digest, engine_digest=description.digest)
    write_models(output / REPOSITORY, build_configs(settings, paths), list_modules("trtseek_child.py"))
    shutil.copytree(MODEL_REPO / "backends", output / BACKENDS, ignore=shutil.ignore_patterns("__pycache__"))
    check_repository(output / REPOSITORY, backends=output / BACKENDS)
    return Repository(path=output / REPOSITORY, backends=output / BACKENDS, network_digest=digest, artifacts=artifacts)


def make_settings(config: Config, *, network_digest: str, engine_digest: str) -> RepositorySettings:
    """What of a config the models are told."""
    build, package = config.stages.build, config.stages.package
    return RepositorySettings(
        max_batch_size=build.max_batch_size,
        max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
        block_size=build.block_size,
        network_digest=network_digest,
        engine_digest=engine_digest,
        **package.model_dump(exclude={"flavour", "check"}),
    )


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


def _list_files(description: EngineDescription, engine: Path, checkpoint: Path, network: Path) -> dict[str, list[Path]]:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.description import DESCRIPTION
    from pipeline.engine.limits import STRIPPED

    folder = CheckpointFolder.open(checkpoint)
    if not (checkpoint / "tokenizer_config.json").is_file():
        raise PackageError(
            f"{checkpoint} has no tokenizer, and the models take and give text",
            hint="copy tokenizer.json and tokenizer_config.json into the model's folder and convert it again",
        )
    # Of an engine without weights: what it lacks.
    refit_list = [engine / "refit.json"] if description.weights == STRIPPED else []
    return {
        "engine": [engine / DESCRIPTION, engine / description.file, *refit_list],
        "checkpoint": [*folder.files, network],
        "tokenizer": folder.tokenizer_files,
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
    except (OSError, ValueError) as error:
        raise PackageError(f"{path}: {error}", hint="run the build stage again") from error
    if not isinstance(value, dict):
        raise PackageError(f"{path}: does not hold a JSON object", hint="run the build stage again")
    return value
