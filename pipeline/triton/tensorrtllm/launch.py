"""launch.sh: how a package is started in NVIDIA's image, over as many GPUs as the engine has ranks."""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeline.triton import MODEL_REPO

SCRIPT = "launch.sh"


def write_launch(package: Path, *, ranks: int, version: str, image: str) -> Path:
    """`version`: the one of TensorRT-LLM that loads the engine; `image`: a container that carries it."""
    values = {"ranks": ranks, "tensorrt_llm": version, "image": image}
    head = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
    body = (MODEL_REPO / "launch" / "tensorrtllm.sh").read_text(encoding="utf-8")
    script = package / SCRIPT
    script.write_text(f"#!/usr/bin/env bash\n{head}\n{body}", encoding="utf-8")
    script.chmod(0o755)
    return script
