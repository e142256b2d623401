"""What an emitted repository holds, read back from its files: for `trtseek inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PackageError
from pipeline.triton.lint import lint_repository
from pipeline.triton.model_config import parse_config
from pipeline.triton.repository import BACKENDS, REPOSITORY

ENGINE_MODEL = "tensorrt_llm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One Triton model. `backend` is the ensemble's platform where it has no backend."""

    name: str
    backend: str
    max_batch_size: int
    inputs: int
    outputs: int
    decoupled: bool
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryDescription:
    """A repository, its artifacts by kind with their bytes, and what `lint` finds."""

    path: Path
    models: tuple[ModelDescription, ...]
    network_digest: str
    artifacts: Mapping[str, int]
    problems: tuple[str, ...]


def is_repository(path: Path) -> bool:
    """Whether `path` is an emitted package, or the model repository in one."""
    return (_find_models(path) / ENGINE_MODEL / "config.pbtxt").is_file()


def describe_repository(path: Path) -> RepositoryDescription:
    """Reads a package's folder, or the model repository in it. Raises PackageError where it is neither."""
    if not is_repository(path):
        raise PackageError(
            f"{path} holds no model repository", hint=f"name the folder above {REPOSITORY}/, or {REPOSITORY}/ itself"
        )
    models = _find_models(path)
    descriptions = {file.parent.name: _describe_model(file) for file in sorted(models.glob("*/config.pbtxt"))}
    parameters = descriptions[ENGINE_MODEL].parameters
    keys = {"engine": "gpt_model_path", "checkpoint": "checkpoint_path", "tokenizer": "tokenizer_dir"}
    folders = {kind: models / ENGINE_MODEL / parameters[key] for kind, key in keys.items() if key in parameters}
    return RepositoryDescription(
        path=models,
        models=tuple(descriptions.values()),
        network_digest=parameters.get("network_digest", ""),
        artifacts={kind: _count_bytes(folder) for kind, folder in folders.items()},
        problems=tuple(lint_repository(models, backends=models.parent / BACKENDS)),
    )


def _find_models(path: Path) -> Path:
    return path / REPOSITORY if (path / REPOSITORY).is_dir() else path


def _describe_model(file: Path) -> ModelDescription:
    config = parse_config(file.read_text(encoding="utf-8"), str(file))
    return ModelDescription(
        name=config.name,
        backend=config.backend or config.platform,
        max_batch_size=config.max_batch_size,
        inputs=len(config.input),
        outputs=len(config.output),
        decoupled=config.model_transaction_policy.decoupled,
        parameters={key: value.string_value for key, value in sorted(config.parameters.items())},
    )


def _count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
