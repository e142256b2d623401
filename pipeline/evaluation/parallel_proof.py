"""The networks of all ranks of a parallel model, run together as they are served: a process each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.evaluation.forward import RESIDENT_BYTES, digest_network, read_program
from pipeline.network.spec import NetworkSpec
from pipeline.sharding import Parallel, Rank

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.schedule import Schedule
    from pipeline.runtime.runner import RankInterpreterRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNetworks:
    """Of an engine checkpoint and a network without a rank."""

    checkpoint: CheckpointFolder
    spec: NetworkSpec
    parallel: Parallel

    def run(self, schedule: Schedule) -> Iterator[torch.Tensor]:
        """Logits [T, V] of each step in exact arithmetic, without the rounding of linears' inputs. Raises RunnerError
        where a rank fails."""
        from pipeline.runtime.rank_group import RankGroup

        arguments = {"checkpoint": str(self.checkpoint.path), "spec": self.spec.to_json()}
        with RankGroup(self.parallel, f"{__name__}:make_runner", arguments) as group:
            group.allocate(schedule.num_blocks)
            for step in schedule.steps:
                yield group.step({name: tensor.numpy() for name, tensor in step.inputs.items()})

    def digests(self) -> tuple[str, ...]:
        """Of each rank's network."""
        digest = partial(digest_network, self.checkpoint, self.checkpoint.architecture)
        return tuple(digest(replace(self.spec, rank=rank)) for rank in self.parallel.ranks)


def make_runner(rank: Rank, checkpoint: str, spec: str) -> RankInterpreterRunner:
    """In the process of the rank."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.network.widening import widen_inputs
    from pipeline.runtime.runner import RankInterpreterRunner

    folder = CheckpointFolder.open(Path(checkpoint))
    program = read_program(folder, folder.architecture, replace(NetworkSpec.from_json(spec), rank=rank))
    resident = RESIDENT_BYTES // rank.parallel.world
    return RankInterpreterRunner(widen_inputs(program), rank, mode="exact", resident_bytes=resident)
