"""The networks of all ranks of a parallel model, run together, a process each; slice by slice where they are large."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.evaluation.forward import RESIDENT_BYTES, digest_network, read_program
from pipeline.network import inputs as ports
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.sharding import Parallel, Rank, layers
from plugins.moe_all_to_all.operation import MoeDispatch

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.schedule import Schedule
    from pipeline.runtime.runner import Inputs, InterpreterPools

Slice = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNetworks:
    """Of an engine checkpoint and a network without a rank. sent_rounded: whether rows go to experts as the engine
    sends them, in FP8; else as they are."""

    checkpoint: CheckpointFolder
    spec: NetworkSpec
    parallel: Parallel
    sent_rounded: bool = False

    def run(self, schedule: Schedule, segments: Sequence[Slice]) -> Iterator[torch.Tensor]:
        """Logits [T, V] of each step in exact arithmetic, without the rounding of linears' inputs and of the cache, and
        of rows on their way unless `sent_rounded`. No rank holds more than its part of a segment. Raises RunnerError
        where a rank fails."""
        from pipeline.runtime.rank_group import RankGroup

        slices = self._cut(segments)
        arguments = {"checkpoint": str(self.checkpoint.path), "spec": self.spec.to_json(), "slices": slices}
        arguments["keep"] = [MoeDispatch.NAME] if self.sent_rounded else []
        with RankGroup(self.parallel, f"{__name__}:RankSlices", arguments) as group:
            for _, last in slices:
                group.allocate(schedule.num_blocks)
                for step in schedule.steps:
                    logits = group.step({name: tensor.numpy() for name, tensor in step.inputs.items()})
                    if last == self.checkpoint.architecture.num_layers:
                        yield logits

    @property
    def native(self) -> RankNetworks | None:
        """The same without plugins, where one of them is what ranks exchange by: one rank alone does not run that."""
        if "moe_all_to_all" not in self.spec.lowering.plugins():
            return None
        return replace(self, spec=replace(self.spec, lowering=Lowering(), kv_cache="model"))

    @property
    def rounded(self) -> RankNetworks | None:
        """The same, rows sent as the engines do, where that is not as they are."""
        if self.spec.expert_payload == "model" or "moe_all_to_all" not in self.spec.lowering.plugins():
            return None
        return replace(self, sent_rounded=True)

    def digests(self) -> tuple[str, ...]:
        """Of each rank's network."""
        digest = partial(digest_network, self.checkpoint, self.checkpoint.architecture)
        return tuple(digest(replace(self.spec, rank=rank)) for rank in self.parallel.ranks)

    def _cut(self, segments: Sequence[Slice]) -> list[Slice]:
        """The segments, each within one pipeline stage."""
        stages = {layers(self.checkpoint.architecture, rank) for rank in self.parallel.ranks}
        ends = sorted({end for each in (*segments, *stages) for end in each})
        return list(itertools.pairwise(ends))


class RankSlices:
    """One rank, in its process: a runner (runtime.runner.RankRunner) whose `allocate` takes up the next slice, for
    which all steps follow. Its logits are of no rows until the last slice."""

    def __init__(
        self, rank: Rank, checkpoint: str, spec: str, slices: Sequence[Slice], keep: Sequence[str] = ()
    ) -> None:
        from pipeline.checkpoint.folder import CheckpointFolder

        self._folder = CheckpointFolder.open(Path(checkpoint))
        self._rank, self._spec = rank, replace(NetworkSpec.from_json(spec), rank=rank)
        self._slices, self._stage = iter(slices), layers(self._folder.architecture, rank)
        self._last, self._step = 0, 0
        self._keep = keep  # plugins that round as in the engine
        self._runner: InterpreterPools | None = None
        self._hidden: dict[int, torch.Tensor] = {}  # of each step, after the slice before

    def allocate(self, blocks: int) -> None:
        from pipeline.network.widening import widen
        from pipeline.runtime.runner import InterpreterPools

        self._runner = None  # before the next slice is read
        first, self._last = next(self._slices)
        self._step = 0
        if self._stage[0] <= first < self._stage[1]:
            program = read_program(self._folder, self._folder.architecture, self._spec, (first, self._last))
            resident = RESIDENT_BYTES // self._rank.parallel.world
            self._runner = InterpreterPools(widen(program, keep=self._keep), mode="exact", resident_bytes=resident)
            self._runner.allocate(blocks)

    def step(self, inputs: Inputs) -> torch.Tensor:
        import torch

        from pipeline.interpreter.ranks import hand_on, take_hidden

        step, rows = self._step, len(inputs[ports.SLOT_IDS.name])
        self._step += 1
        if self._runner is not None:
            feeds = self._runner.feed(inputs)
            if step in self._hidden:
                feeds[ports.HIDDEN_STATES] = self._hidden[step]
            wanted = [spec.name for spec in self._runner.interpreter.program.inputs]
            outputs = self._runner.interpreter.run({name: feeds[name] for name in wanted})
            if ports.LOGITS in outputs:
                return outputs[ports.LOGITS]
            self._hidden[step] = outputs[ports.HIDDEN_STATES_OUT]
            if self._last == self._stage[1]:
                hand_on(self._rank, self._hidden.pop(step))
        elif self._last == self._stage[0]:
            shape = rows, self._folder.architecture.hidden_size
            self._hidden[step] = take_hidden(self._rank, shape, torch.float32)
        return torch.empty(0)
