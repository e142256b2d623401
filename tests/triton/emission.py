"""A package made from a small checkpoint and a stand-in for its engine: emission reads engine.json, not the engine."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.schema import Config
from pipeline.digest import digest_file
from pipeline.engine.description import BuildRecord, EngineDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.spec import NetworkSpec
from pipeline.triton.repository import Repository, emit_repository

NETWORK_DIGEST = "blake3:" + "ab" * 32


def make_config(**package: object) -> Config:
    return Config(
        name="test",
        model={"path": Path("models/test")},
        target={"gpu": "L4"},
        stages={"build": {"max_batch_size": 8, "max_seq_len": 256}, "package": package},
    )


def describe_engine(**values: object) -> EngineDescription:
    limits = BuildLimits(
        max_seq_len=256,
        max_batch_size=8,
        max_num_tokens=128,
        generation=(Rectangle(batch=8, length=256),),
        block_size=64,
        max_blocks=40,
    )
    usual = {
        "file": "model.engine",
        "nbytes": 6,
        "digest": "blake3:engine",
        "backend": "tensorrt_rtx",
        "backend_version": "1.7.1.116",
        "sm": 89,
        "network_digest": NETWORK_DIGEST,
        "spec": NetworkSpec(dtype="float16", block_size=64, max_seq_len=256),
        "limits": limits,
        "inputs": (),
        "outputs": (),
        "profiles": (),
        "weights_bytes": None,
        "sources": {},
        "build": BuildRecord(seconds=0, peak_bytes=0, peak_anonymous_bytes=0),
    }
    return EngineDescription(**usual | values)


def make_engine(folder: Path, checkpoint: Path) -> Path:
    folder.mkdir()
    (folder / "model.engine").write_bytes(b"engine")
    shards = [file for file in CheckpointFolder.open(checkpoint).files if file.suffix == ".safetensors"]
    description = describe_engine(
        digest=digest_file(folder / "model.engine"), sources={file.name: digest_file(file) for file in shards}
    )
    (folder / "engine.json").write_text(description.to_json())
    (folder / "network.json").write_text(json.dumps({"spec": {}, "digest": NETWORK_DIGEST}))
    return folder


def emit(folder: Path, checkpoint: Path, **keywords: object) -> Repository:
    """The repository in `folder / "package"`, its engine in `folder / "engine"`."""
    engine = folder / "engine"
    if not engine.exists():
        make_engine(engine, checkpoint)
    return emit_repository(
        folder / "package",
        config=keywords.pop("config", make_config()),
        engine=engine,
        checkpoint=checkpoint,
        network=engine / "network.json",
        **keywords,
    )
