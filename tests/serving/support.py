"""A package that serves: a small checkpoint, converted and emitted, with a stand-in for the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.schema import Config
from pipeline.digest import digest_file
from pipeline.engine.description import EngineDescription
from pipeline.engine.rank_engines import join, name_rank
from pipeline.evaluation.forward import digest_network, read_program
from pipeline.network.program import Program
from pipeline.network.spec import NetworkSpec
from pipeline.runtime.generation import generate
from pipeline.runtime.runner import InterpreterRunner
from pipeline.sharding import Parallel
from pipeline.triton.repository import Repository, emit_repository
from pipeline.workspace import FolderWorkspace
from tests.triton.emission import describe_engine

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Served:
    """A package, and what its answers are compared with."""

    repository: Repository
    source: Path
    checkpoint: CheckpointFolder
    program: Program

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt alone, by the interpreter without server or scheduler."""
        return [
            generate(self.runner, [prompt], max_new_tokens=max_new_tokens, block_size=BLOCK_SIZE, eos_token_ids=())[0]
            for prompt in prompts
        ]

    @cached_property
    def runner(self) -> InterpreterRunner:
        return InterpreterRunner(self.program, mode="exact")


def make_config(
    name: str = "served", parallel: dict[str, int] | None = None, *, max_batch_size: int = 8, **package: object
) -> Config:
    return Config(
        name=name,
        model={"path": Path("models/test")},
        target={"gpu": "L4", "parallel": parallel or {}},
        stages={
            "build": {
                "block_size": BLOCK_SIZE,
                "max_batch_size": max_batch_size,
                "max_seq_len": 256,
                "max_num_tokens": 128,
            },
            "package": {"interpreter_mode": "exact", **package},
        },
    )


def serve_package(folder: Path, source: Path, config: Config | None = None) -> Served:
    """Converts the Hugging Face folder `source` and emits it under `folder`."""
    config = config or make_config()
    checkpoint_path = folder / "checkpoint"
    checkpoint_path.mkdir(parents=True)
    convert_checkpoint(
        CheckpointFolder.open(source), FolderWorkspace(checkpoint_path), dtype="float16", overflow="clip"
    )
    checkpoint = CheckpointFolder.open(checkpoint_path)
    build = config.stages.build
    spec = NetworkSpec(dtype="float16", block_size=build.block_size, max_seq_len=build.max_seq_len)
    program = read_program(checkpoint, checkpoint.architecture, spec)
    engine = folder / "engine"
    description = write_engine(engine, config, checkpoint, spec, program)
    (engine / "network.json").write_text(
        json.dumps({"spec": json.loads(spec.to_json()), "digest": description.network_digest})
    )
    repository = emit_repository(
        folder / "package", config=config, engine=engine, checkpoint=checkpoint_path, network=engine / "network.json"
    )
    return Served(repository, source, checkpoint, program)


def write_engine(
    folder: Path, config: Config, checkpoint: CheckpointFolder, spec: NetworkSpec, program: Program
) -> EngineDescription:
    """What `build` leaves, with stand-ins for the engines."""
    parallel = Parallel(**config.target.parallel.model_dump())
    if parallel.world == 1:
        return write_rank(folder, config, checkpoint, spec, program.digest())
    ranks = []
    for rank in parallel.ranks:
        own = replace(spec, rank=rank)
        digest = digest_network(checkpoint, checkpoint.architecture, own)
        ranks.append(write_rank(folder / name_rank(rank.index), config, checkpoint, own, digest))
    joint = join(ranks)
    (folder / "engine.json").write_text(joint.to_json())
    return joint


def write_rank(
    folder: Path, config: Config, checkpoint: CheckpointFolder, spec: NetworkSpec, digest: str
) -> EngineDescription:
    folder.mkdir(parents=True)
    (folder / "model.engine").write_bytes(f"rank {spec.rank.index}".encode())
    description = describe_engine(
        digest=digest_file(folder / "model.engine"),
        network_digest=digest,
        spec=spec,
        limits=config.stages.build.limits(),
        sources={file.name: digest_file(file) for file in checkpoint.files if file.suffix == ".safetensors"},
    )
    (folder / "engine.json").write_text(description.to_json())
    return description
