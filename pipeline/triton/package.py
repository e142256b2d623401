"""A package on this machine: whether it is whole, and the server that serves it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PackageError
from pipeline.release.manifest import MANIFEST, find_wrong_sizes
from pipeline.triton import MODEL_REPO
from pipeline.triton.backend.belonging import check_format
from pipeline.triton.backend.rehearsal import describe_rehearsal
from pipeline.triton.emission import BACKENDS, REPOSITORY
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import Installation
from pipeline.triton.launch import SCRIPT
from pipeline.triton.model_config import EXECUTOR, parse_config
from pipeline.triton.server import TritonServer

STAND_INS = MODEL_REPO / "rehearsal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What stands in for an engine of TensorRT-LLM: the engine checkpoint that it was built from, run by the
    interpreter in this mode."""

    checkpoint: Path
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`backends`: the Python-based ones that come with it; None where NVIDIA's image has what it needs."""

    folder: Path
    repository: Path
    backends: Path | None

    def make_server(
        self, installation: Installation, *, log: Path, rehearsal: Rehearsal | None = None, **options: Any
    ) -> TritonServer:
        """A server that is not yet started; `options` are TritonServer's. A package for NVIDIA's image is rehearsed,
        not a byte changed: our backend stands in under the other's name. Raises ServerError where it is asked to serve
        without."""
        if self.backends is not None:
            return TritonServer(installation, repository=self.repository, backends=[self.backends], log=log, **options)
        if rehearsal is None:
            raise ServerError(
                f"{self.folder} is for TensorRT-LLM's own backend, which is in NVIDIA's image alone",
                hint=f"start {self.folder / SCRIPT} there, or rehearse it here: `trtseek serve --rehearse CONFIG`",
            )
        return TritonServer(
            installation,
            repository=self.repository,
            backends=[STAND_INS],
            log=log,
            environment=describe_rehearsal(rehearsal.checkpoint, rehearsal.mode),
            **options,
        )


def find_package(folder: Path) -> Package:
    """Raises PackageError where the folder is none, damaged, or of another version of trtseek: Triton would say that a
    model cannot be loaded, and no more."""
    repository, backends = folder / REPOSITORY, folder / BACKENDS
    if not repository.is_dir():
        raise PackageError(f"{repository} is missing: {folder} is no package", hint="`trtseek engine CONFIG` makes one")
    if (folder / MANIFEST).is_file():
        # Whoever serves a package may set its models' parameters: a config.pbtxt only has to be one.
        problems = [each for each in find_wrong_sizes(folder) if "config.pbtxt has " not in each]
        if problems:
            raise PackageError("\n".join(problems), hint="copy the package again, or make it again: `trtseek engine`")
    configs = read_configs(repository)
    if not configs and (repository / EXECUTOR).is_dir():
        raise PackageError(
            f"{folder} is for TensorRT-LLM's LLM API, whose Triton model is in NVIDIA's image alone",
            hint=f"start {folder / SCRIPT} there",
        )
    if EXECUTOR in configs and configs[EXECUTOR].backend == "trtseek":
        check_format(folder, read_parameters(configs[EXECUTOR]))
    is_foreign = EXECUTOR in configs and configs[EXECUTOR].backend == "tensorrtllm"
    if not is_foreign and not backends.is_dir():
        raise PackageError(f"{backends} is missing: {folder} is no package", hint="`trtseek engine CONFIG` makes one")
    return Package(folder=folder, repository=repository.resolve(), backends=None if is_foreign else backends.resolve())


def read_configs(repository: Path) -> dict[str, Any]:
    """The models' ModelConfigs, by name. Raises PackageError."""
    return {
        file.parent.name: parse_config(file.read_text(encoding="utf-8"), str(file))
        for file in sorted(repository.glob("*/config.pbtxt"))
    }


def read_parameters(config: Any) -> dict[str, str]:
    """Of a ModelConfig."""
    return {key: value.string_value for key, value in config.parameters.items()}
