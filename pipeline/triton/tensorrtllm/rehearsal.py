"""A package for NVIDIA's image in a tritonserver of this machine: our backend stands in under the name tensorrtllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.triton import MODEL_REPO
from pipeline.triton.backend.rehearsal import describe_rehearsal
from pipeline.triton.emission import REPOSITORY
from pipeline.triton.installation import Installation
from pipeline.triton.server import TritonServer

BACKENDS = MODEL_REPO / "rehearsal"


def rehearse(
    installation: Installation, package: Path, *, checkpoint: Path, mode: str, log: Path, **options: Any
) -> TritonServer:
    """A server that is not yet started. `checkpoint`: the engine checkpoint that the engine was built from; `mode`: of
    the interpreter; `options`: TritonServer's."""
    return TritonServer(
        installation,
        repository=(package / REPOSITORY).resolve(),
        backends=[BACKENDS],
        log=log,
        environment=describe_rehearsal(checkpoint, mode),
        **options,
    )
