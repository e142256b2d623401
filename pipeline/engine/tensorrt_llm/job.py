"""A job bundle: all that building an engine takes on another host, and nothing of this one.

    checkpoint/         config.json, rank{N}.safetensors (written before, by `ranks`)
    build.sh            checks the files, the GPU and the versions, runs trtllm-build, leaves a receipt
    job.env, arguments  what build.sh reads
    build_config.json   the same as BuildConfig, for trtllm-build --build_config
    job.json            what was asked, for whoever takes the engine back
    README.md, SHA256SUMS

The SHA-256 of SHA256SUMS names the job: the receipt states it, so that an engine of other weights is not taken back.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.digest import sha256_file
from pipeline.engine.document import read_document
from pipeline.engine.tensorrt_llm.options import build_config, list_arguments
from pipeline.engine.tensorrt_llm.request import EngineRequest
from pipeline.engine.tensorrt_llm.versions import load_releases
from pipeline.errors import BuildError, spell_reason

CHECKPOINT, CONFIG, SCRIPT, JOB, SUMS = "checkpoint", "config.json", "build.sh", "job.json", "SHA256SUMS"
BUILD_CONFIG, README = "build_config.json", "README.md"
FORMAT = 1


def write_job(
    folder: Path, request: EngineRequest, *, name: str, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Writes everything beside `folder`/checkpoint, which is there; `name` is the config's. The same request and
    checkpoint give the same bytes. `on_bytes` is told of what was digested. Raises BuildError."""
    if not (folder / CHECKPOINT / CONFIG).is_file():
        raise BuildError(f"{folder / CHECKPOINT}: holds no {CONFIG}", hint="write the rank checkpoints first")
    source = resources.files(__package__)
    script = folder / SCRIPT
    script.write_bytes(source.joinpath(SCRIPT).read_bytes())
    script.chmod(0o755)
    arguments = list_arguments(request, "checkpoint", "engine")[4:]
    (folder / "arguments").write_text("".join(f"{argument}\n" for argument in arguments), encoding="utf-8")
    (folder / "job.env").write_text(_write_environment(request, name), encoding="utf-8")
    _write_json(folder / BUILD_CONFIG, build_config(request))
    _write_json(folder / JOB, {"format": FORMAT, "name": name, "request": request.to_json()})
    template = source.joinpath("job_readme.md").read_text(encoding="utf-8")
    (folder / README).write_text(template.format_map(_describe(request, name)), encoding="utf-8")
    (folder / SUMS).write_text(_sum_up(folder, on_bytes), encoding="utf-8")


def name_job(folder: Path) -> str:
    """The job's name, hex. Raises BuildError where the folder holds no job."""
    try:
        return hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"{folder / SUMS}: {error.strerror}", hint="run the job stage again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A document of the job's. Raises BuildError."""
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{path}: cannot be read: {spell_reason(error)}", hint="run the job stage again") from None
    return document


def read_request(folder: Path) -> EngineRequest:
    """What a job asked. Raises BuildError."""
    values = read_document(folder / JOB, kind="a job", version=FORMAT, hint="run the job stage again")
    try:
        return EngineRequest.from_json(values["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"{folder / JOB}: states no request: {error}", hint="run the job stage again") from None


def _describe(request: EngineRequest, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": request.image,
        "version": request.version,
        "tensorrt": load_releases()[request.version].series,
        "gpu": request.gpu,
        "sm": request.sm,
        "ranks": request.parallel.world,
        "workers": request.workers,
    }


def _write_environment(request: EngineRequest, name: str) -> str:
    values = {**_describe(request, name), "config": name}
    keys = ("config", "image", "version", "tensorrt", "gpu", "sm", "workers")
    return "".join(f"JOB_{key.upper()}={shlex.quote(str(values[key]))}\n" for key in keys)


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _sum_up(folder: Path, on_bytes: Callable[[int], None] | None) -> str:
    """As sha256sum writes it."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return "".join(f"{sha256_file(folder / name, on_bytes)}  {name}\n" for name in files if name != SUMS)
