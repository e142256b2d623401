"""A package of flavour tensorrtllm, with a stand-in for the engine: emission reads its config.json, not the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.engine.tensorrt_llm.options import build_config
from pipeline.engine.tensorrt_llm.record import ENGINE, EngineRecord
from pipeline.engine.tensorrt_llm.request import make_request
from pipeline.triton.tensorrtllm.repository import emit_repository


def make_config(package: Mapping[str, Any] | None = None, tensor: int = 1, **build: Any) -> Config:
    return Config.model_validate(
        {
            "name": "test",
            "model": {"path": "models/test"},
            "target": {"gpu": "H100", "backend": "tensorrt_llm", "parallel": {"tensor": tensor}},
            "stages": {
                "build": {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 64, "block_size": 16, **build},
                "quantize": {"method": "none"},
                "package": package or {},
            },
        },
        strict=False,
    )


def write_build(folder: Path, config: Config) -> Path:
    """The build stage's output: an engine's folder, and its record."""
    request = make_request(config, None)
    engine = folder / ENGINE
    engine.mkdir(parents=True)
    described = {
        "version": request.version,
        "pretrained_config": {"mapping": {"world_size": request.parallel.world}},
        "build_config": build_config(request),
    }
    (engine / "config.json").write_text(json.dumps(described))
    for rank in range(request.parallel.world):
        (engine / f"rank{rank}.engine").write_bytes(b"engine")
    EngineRecord(
        version=request.version,
        image=request.image,
        sm=90,
        tensorrt="10.14.1.48",
        job="0" * 64,
        network_digest="blake3:n",
        request=request.to_json(),
        files={file.name: file.stat().st_size for file in engine.iterdir()},
    ).write(folder)
    return folder


def emit(folder: Path, checkpoint: Path, config: Config | None = None) -> Path:
    """The package, in `folder / "package"`."""
    config = config or make_config()
    build = write_build(folder / "build", config)
    emit_repository(folder / "package", config=config, build=build, checkpoint=checkpoint)
    return folder / "package"
