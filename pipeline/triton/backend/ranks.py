"""What runs a packaged network or engine: the whole of it, or one rank's in the process of that rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engine.description import DESCRIPTION, EngineDescription, load_description
from pipeline.errors import CompatibilityError, PackageError

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.network.program import Program
    from pipeline.network.spec import NetworkSpec
    from pipeline.runtime.engine_runner import EngineRunner
    from pipeline.runtime.runner import RankInterpreterRunner
    from pipeline.sharding import Rank


def rebuild_program(checkpoint: CheckpointFolder, spec: NetworkSpec, digest: str) -> Program:
    """The network, written again and read back. Raises PackageError where it is not the one of that digest."""
    import tensorrt_rtx as trt

    from pipeline.network.network import build_network
    from pipeline.network.readback import read_network

    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    program = read_network(build_network(trt, network, spec, checkpoint.architecture, checkpoint))
    if (found := program.digest()) != digest:
        raise PackageError(
            f"the network of {checkpoint.path} is {found}, and the one that was proved is {digest}",
            hint="it was packaged by another version of trtseek, or its checkpoint was changed: package it again",
        )
    return program


def load_rank(
    rank: Rank, *, engine: str, checkpoint: str, mode: Any, resident_bytes: int | None = None
) -> RankInterpreterRunner:
    """In the process of the rank: its network, written again and run by the interpreter."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.runtime.runner import RankInterpreterRunner

    description = load_description(Path(engine)).all_ranks[rank.index]
    program = rebuild_program(CheckpointFolder.open(Path(checkpoint)), description.spec, description.network_digest)
    return RankInterpreterRunner(program, rank, mode=mode, resident_bytes=resident_bytes)


def load_rank_engine(rank: Rank, *, engine: str, weights: float) -> EngineRunner:
    """In the process of the rank, on the GPU of that number. Raises CompatibilityError where there is none, or NCCL is
    not; PackageError where the engines are of other ranks. Not yet run on hardware."""
    import torch

    from plugins.nccl import find_group

    folder = Path(engine)
    ranks = load_description(folder).all_ranks
    if [each.spec.rank for each in ranks] != list(rank.parallel.ranks):
        raise PackageError(
            f"{folder} has engines of {ranks[0].spec.rank.parallel}, and rank {rank.index} is one of {rank.parallel}",
            hint="package the engines again",
        )
    if (seen := torch.cuda.device_count()) <= rank.index:
        raise CompatibilityError(
            f"rank {rank.index} of {rank.parallel.world} runs on GPU {rank.index}, and torch {torch.__version__} sees "
            f"{seen or 'none'}",
            hint="check CUDA_VISIBLE_DEVICES, the driver with nvidia-smi, and that torch was built for CUDA",
        )
    torch.cuda.set_device(rank.index)
    communicator = find_group(0, rank.parallel.world).handle.value
    return run_engine(folder, ranks[rank.index], weights_fraction=weights, communicator=communicator)


def run_engine(folder: Path, description: EngineDescription, **options: Any) -> EngineRunner:
    """Raises PackageError where the file is not the one that was described."""
    from pipeline.digest import digest_file
    from pipeline.runtime.engine_runner import EngineRunner

    engine = folder / description.file
    if (found := digest_file(engine)) != description.digest:
        raise PackageError(
            f"{engine} is {found}, {DESCRIPTION} says {description.digest}", hint="copy the package again"
        )
    return EngineRunner(engine, description, **options)
