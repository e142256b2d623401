"""The engines of a parallel model: one for each rank, each in a folder of its own, and one description of them all.

engine.json               rank 0's, and the others' in it
rank{N}/model.engine      with its own engine.json: whole for whoever runs that rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.engine.description import DESCRIPTION, EngineDescription, load_description

if TYPE_CHECKING:
    from pipeline.network.spec import NetworkSpec
    from pipeline.sharding import Parallel
    from pipeline.workspace import Workspace


def name_rank(index: int) -> str:
    """The rank's folder."""
    return f"rank{index}"


def build_ranks(
    parallel: Parallel,
    spec: NetworkSpec,
    workspace: Workspace,
    build: Callable[[NetworkSpec, Path], EngineDescription],
) -> EngineDescription:
    """Builds each rank's engine, one after another, and writes `engine.json`; a killed run goes on at the rank where it
    was. `build(spec, folder)` is builder.build_engine for the spec of one rank."""
    built = []
    for rank in parallel.ranks:
        name = name_rank(rank.index)
        folder = workspace.path / name
        if not workspace.is_done(name):
            build(replace(spec, rank=rank), folder)
            workspace.finish(name, sorted(file for file in folder.iterdir() if file.is_file()))
        built.append(load_description(folder))
    return write_joint(built, workspace.path)


def list_folders(folder: Path) -> list[Path]:
    """Each rank's own, in order; the engine's, where it is the only one. Raises BuildError as `load_description`."""
    others = load_description(folder).ranks
    return [folder / name_rank(rank) for rank in range(len(others) + 1)] if others else [folder]


def write_joint(ranks: Sequence[EngineDescription], folder: Path) -> EngineDescription:
    """engine.json over ranks that lie in their folders."""
    joint = join(ranks)
    (folder / DESCRIPTION).write_text(joint.to_json(), encoding="utf-8")
    return joint


def join(ranks: Sequence[EngineDescription]) -> EngineDescription:
    """One description of ranks that lie in their folders."""
    first, *others = (replace(rank, file=f"{name_rank(i)}/{rank.file}") for i, rank in enumerate(ranks))
    return replace(first, ranks=tuple(others))
