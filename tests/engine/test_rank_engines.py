"""One engine for each rank, and the description of them all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.digest import digest_bytes, digest_json
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription, load_description
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.rank_engines import build_ranks
from pipeline.errors import CheckpointError
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.sharding import Parallel, Rank
from pipeline.workspace import FolderWorkspace
from tests.engine.checkpoints import TINY_LLAMA, TINY_V2, write_engine_checkpoint
from tests.engine.conftest import LLAMA_INT4, V2_INT4
from tests.engine.failing import SMALL
from tests.triton.emission import describe_engine

SPEC = NetworkSpec(dtype="float16", max_seq_len=256)
PARALLEL = Parallel(tensor=2, pipeline=2)
ONE_LAYER = TINY_LLAMA | {"num_hidden_layers": 1}
FOUR_GROUPS = TINY_V2 | {"moe_intermediate_size": 128}  # of 32 inputs of each expert: one for each of four ranks


class Builder:
    """Writes what builder.build_engine does, without TensorRT. `fails_at`: the rank that it is killed at."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.built = fails_at, list[Rank]()

    def __call__(self, spec: NetworkSpec, folder: Path) -> EngineDescription:
        if spec.rank.index == self.fails_at:
            raise KeyboardInterrupt
        self.built.append(spec.rank)
        folder.mkdir(exist_ok=True)
        content = f"engine of {spec.rank.index}".encode()
        (folder / "model.engine").write_bytes(content)
        description = describe_engine(
            spec=spec, digest=digest_bytes(content), nbytes=len(content), network_digest=f"blake3:{spec.rank.index}"
        )
        (folder / "engine.json").write_text(description.to_json())
        return description


def test_a_description_of_all_ranks(tmp_path: Path) -> None:
    builder = Builder()
    built = build_ranks(PARALLEL, SPEC, FolderWorkspace(tmp_path), builder)
    assert builder.built == list(PARALLEL.ranks)
    read = load_description(tmp_path)
    assert read == built
    assert [rank.file for rank in read.all_ranks] == [f"rank{rank}/model.engine" for rank in range(4)]
    assert [rank.spec.rank for rank in read.all_ranks] == list(PARALLEL.ranks)
    assert [rank.network_digest for rank in read.all_ranks] == [f"blake3:{rank}" for rank in range(4)]
    for rank in read.all_ranks:
        assert (tmp_path / rank.file).stat().st_size == rank.nbytes
        own = load_description((tmp_path / rank.file).parent)
        assert (own.digest, own.spec, own.ranks) == (rank.digest, rank.spec, ())


def test_the_sets_digest_is_of_every_ranks_engine(tmp_path: Path) -> None:
    built = build_ranks(PARALLEL, SPEC, FolderWorkspace(tmp_path), Builder())
    assert built.set_digest == digest_json([rank.digest for rank in built.all_ranks]) != built.digest
    alone = describe_engine()
    assert alone.set_digest == alone.digest


def test_a_killed_build_goes_on_at_its_rank(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_ranks(PARALLEL, SPEC, FolderWorkspace(tmp_path), Builder(fails_at=2))
    assert not (tmp_path / "engine.json").exists()
    second = Builder()
    build_ranks(PARALLEL, SPEC, FolderWorkspace(tmp_path), second)
    assert [rank.index for rank in second.built] == [2, 3]


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, list(arguments), standalone_mode=False, catch_exceptions=False).stdout


def compiling(checkpoint: Path, **options: Any) -> Callable[[NetworkSpec, Path], EngineDescription]:
    """Builds each rank's engine for SM80 with TensorRT itself."""

    def build(spec: NetworkSpec, folder: Path) -> EngineDescription:
        return build_engine(
            backend="tensorrt_rtx",
            checkpoint=checkpoint,
            spec=spec,
            limits=SMALL,
            sm=80,
            output=folder / "model.engine",
            log=folder / "build.log",
            **options,
        )

    return build


def test_ranks_built_without_weights_are_inspected_and_compared_with_their_checkpoint(
    tmp_path: Path,
) -> None:
    parallel, checkpoint = Parallel(tensor=2), tmp_path / "checkpoint"
    write_engine_checkpoint(checkpoint, ONE_LAYER, int4=LLAMA_INT4, group=64)

    spec = NetworkSpec(dtype="float16", max_seq_len=SMALL.max_seq_len, block_size=SMALL.block_size)
    folder = tmp_path / "engines"
    folder.mkdir()
    built = build_ranks(parallel, spec, FolderWorkspace(folder), compiling(checkpoint, weights="stripped"))
    seen = json.loads(invoke("inspect", str(folder), "--json"))
    assert seen["kind"] == "TensorRT-RTX engines of 2 ranks"
    assert (seen["parallel"], seen["weights"]) == ({"tensor": 2, "pipeline": 1, "expert": 1}, "stripped")
    assert [row["network_digest"] for row in seen["ranks"]] == [rank.network_digest for rank in built.all_ranks]
    assert all(row["exchanges"] > 0 for row in seen["ranks"])  # sums over both ranks
    invoke("refit", str(folder), "--checkpoint", str(checkpoint), "--check")
    other = tmp_path / "other"
    write_engine_checkpoint(other, ONE_LAYER, int4=LLAMA_INT4, group=64, seed=1)
    with pytest.raises(CheckpointError, match="is not the one that the engine was built for"):
        invoke("refit", str(folder), "--checkpoint", str(other), "--check")


EXCHANGED = Lowering(moe_all_to_all="plugin", moe_experts="plugin")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "lowering"),
    [
        (Parallel(tensor=4), Lowering()),
        (Parallel(tensor=4, expert=4), Lowering()),
        (Parallel(tensor=4, expert=4), EXCHANGED),
        (Parallel(tensor=4, expert=2), Lowering()),
        (Parallel(tensor=4, expert=2), EXCHANGED),
    ],
    ids=["TP4", "EP4", "EP4 by plugins", "TP2xEP2", "TP2xEP2 by plugins"],
)
def test_every_rank_of_four_is_compiled(parallel: Parallel, lowering: Lowering, tmp_path: Path) -> None:
    """One dense and one routed layer, with weights, for SM80. Each rank has a part of its own, and sums, gathers and
    exchanges with the others as its place says."""
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "engines"
    write_engine_checkpoint(checkpoint, FOUR_GROUPS, int4=V2_INT4, group=32)
    folder.mkdir()

    spec = NetworkSpec(dtype="float16", max_seq_len=SMALL.max_seq_len, block_size=SMALL.block_size, lowering=lowering)
    built = build_ranks(parallel, spec, FolderWorkspace(folder), compiling(checkpoint))
    assert [rank.spec.rank for rank in built.all_ranks] == list(parallel.ranks)
    assert len({rank.network_digest for rank in built.all_ranks}) == 4
    by_plugin = lowering == EXCHANGED
    plugins = {"moe_dispatch", "moe_experts", "moe_combine"} if by_plugin else set()
    for rank in built.all_ranks:
        assert {plugin.operation for plugin in rank.plugins} == plugins
        for profile in inspect_engine(folder / rank.file).profiles:
            kernels = profile.graph.kernels
            assert profile.workspace_bytes > 0
            # Of the embedding, and of attention and MLP of both layers; of the logits.
            assert (kernels["comm_allreduce"], kernels["comm_allgather"]) == (5, 1)
            assert kernels.get("custom_layer", 0) == len(plugins)
            # Rows and their experts there, rows back.
            assert kernels.get("comm_alltoall", 0) == (3 if parallel.expert > 1 and not by_plugin else 0)
