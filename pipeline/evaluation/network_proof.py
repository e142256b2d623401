"""Proof of the network: the object that the builder compiles, executed on the CPU, against `transformers` in fp32.

Prompts are prefilled in chunks and decoded token by token, in batches of unequal lengths, in steps that mix both, over
scrambled block tables; where RoPE is scaled, one prompt stands beyond the original context. Where linears round their
inputs (FP8, SmoothQuant), or the cache is quantized, that is left out on both sides: what it costs is part of the
quality. A quantized cache is held against the wide one besides, within a bound derived from its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.evaluation.forward import run_network
from pipeline.evaluation.network_findings import NativeProof, NetworkProof, RanksProof, RoundingProof
from pipeline.evaluation.proof_bounds import derive_cache_bound, derive_declared_bound, derive_payload_bound
from pipeline.evaluation.reference import Reference, compute_reference
from pipeline.evaluation.schedule import Schedule, TokenSequence, schedule_prompts
from pipeline.network.spec import Lowering
from pipeline.network.widening import widen, widen_inputs

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.evaluation.forward import Event
    from pipeline.evaluation.parallel_proof import RankNetworks
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

T = TypeVar("T")


def prove_network(
    source: TensorSource,
    config: Mapping[str, Any],
    architecture: Architecture,
    spec: NetworkSpec,
    sequences: Sequence[TokenSequence],
    *,
    prefill_chunk: int,
    router_margin: float,
    segments: Sequence[tuple[int, int]],
    progress: Progress,
    ranks: RankNetworks | None = None,
) -> NetworkProof:
    """Runs both sides. `segments` says whether the network is taken whole, [(0, L)], or in slices; `ranks`: those of a
    parallel model."""
    import torch

    with torch.inference_mode():
        reference = compute_reference(source, config, architecture, sequences, progress)
    schedule = schedule_prompts(sequences, prefill_chunk=prefill_chunk, block_size=spec.block_size)
    run = partial(
        run_network, source, architecture, steps=schedule.steps, num_blocks=schedule.num_blocks, segments=segments
    )
    layers, steps = range(architecture.num_layers), len(schedule.steps)
    comparison = _Comparison(
        run, spec, reference, schedule, layers=len(layers), margin=router_margin, progress=progress
    )
    declared = comparison.measure_declared()
    native = cache = None
    if spec.lowering.plugins():
        progress.start("network without plugins", comparison.events, "layers")
        events = run(spec=replace(spec, lowering=Lowering(), kv_cache="model"), mode="exact", widen=widen)
        native = NativeProof(plugins=spec.lowering.plugins(), **comparison.compare(_logits(events, progress)))
    if spec.kv_cache != "model":
        progress.start(f"network, {spec.kv_cache} cache", comparison.events, "layers")
        error = comparison.measure(_logits(run(spec=spec, mode="exact", widen=widen_inputs), progress))
        cache = RoundingProof(kind=spec.kv_cache, error=error, bound=derive_cache_bound(architecture))

    def run_ranks(ranks: RankNetworks | None, how: str) -> RanksProof | None:
        if ranks is None:
            return None
        progress.start(f"networks of {ranks.parallel.world} ranks{how}", steps, "steps")
        return RanksProof(
            world=ranks.parallel.world, **comparison.compare(_count(ranks.run(schedule, segments), progress))
        )

    payload = None
    if ranks and (sending := ranks.rounded):
        progress.start(f"networks of {ranks.parallel.world} ranks, {ranks.spec.expert_payload} rows", steps, "steps")
        error = comparison.measure(_count(sending.run(schedule, segments), progress))
        payload = RoundingProof(kind=ranks.spec.expert_payload, error=error, bound=derive_payload_bound(architecture))
    return NetworkProof(
        max_logit_error=comparison.worst[None] if comparison.compared else math.inf,
        layer_errors=[comparison.worst[layer] for layer in layers],
        positions=comparison.compared,
        left_out=sum(len(sequence.tokens) for sequence in sequences) - comparison.compared,
        declared_error=declared[None],
        declared_layer_errors=[declared[layer] for layer in layers],
        declared_bound=derive_declared_bound(architecture, spec),
        steps=steps,
        native=native,
        cache=cache,
        ranks=run_ranks(ranks, ""),
        native_ranks=run_ranks(ranks.native if ranks else None, " without plugins"),
        payload=payload,
        mixed_steps=sum(len({p.end - p.start > 1 for p in step.pieces}) == 2 for step in schedule.steps),
    )


class _Comparison:
    """The network in exact arithmetic against the reference, when made; then others against both. `run`: `run_network`
    of the schedule, which gives so many `events`. `worst`: the largest difference by layer, None for the logits;
    `compared`: positions of these."""

    def __init__(
        self,
        run: Callable[..., Iterator[Event]],
        spec: NetworkSpec,
        reference: Reference,
        schedule: Schedule,
        *,
        layers: int,
        margin: float,
        progress: Progress,
    ) -> None:
        self.reference, self.schedule, self.margin, self.progress = reference, schedule, margin, progress
        self._run, self._spec, self.events = run, spec, len(schedule.steps) * (layers + 1)
        self.worst: dict[int | None, float] = {}
        self.compared = 0
        self._exact: dict[tuple[int, int | None], torch.Tensor] = {}
        progress.start("network, exact", self.events, "layers")
        for event in _count(run(spec=spec, mode="exact", widen=widen), progress):
            wanted, keep = self._gather(event.step, event.layer)
            self._exact[event.step, event.layer] = event.rows
            self.worst[event.layer] = max(self.worst.get(event.layer, 0.0), _largest(event.rows - wanted, keep))
            self.compared += int(keep.sum()) if event.layer is None else 0

    def measure_declared(self) -> dict[int | None, float]:
        """What the declared types' rounding changes of each layer's output, and of the logits: see NetworkProof."""
        self.progress.start(f"network, {self._spec.dtype}", self.events, "layers")
        differences: dict[int | None, list[torch.Tensor]] = {}
        for event in _count(self._run(spec=self._spec, mode="declared", widen=widen), self.progress):
            differences.setdefault(event.layer, []).append(self._difference(event.rows, event.step, event.layer))
        return {layer: self._median_share(rows, layer) for layer, rows in differences.items()}

    def measure(self, logits: Iterator[torch.Tensor]) -> float:
        """What it changes that something is rounded, of each step's logits: see RoundingProof."""
        return self._median_share([self._difference(rows, step, None) for step, rows in enumerate(logits)], None)

    def compare(self, logits: Iterator[torch.Tensor]) -> dict[str, float]:
        """The largest differences of each step's logits, as of NativeProof."""
        error = apart = 0.0 if self.compared else math.inf
        for step, rows in enumerate(logits):
            wanted, keep = self._gather(step, None)
            error = max(error, _largest(rows - wanted, keep))
            apart = max(apart, _largest(rows - self._exact[step, None], keep))
        return {"max_logit_error": error, "max_difference": apart}

    def _difference(self, rows: torch.Tensor, step: int, layer: int | None) -> torch.Tensor:
        """The root mean square of each row's difference from the exact one."""
        return (rows.float() - self._exact[step, layer]).square().mean(-1).sqrt()

    def _median_share(self, differences: Sequence[torch.Tensor], layer: int | None) -> float:
        """The median row's difference over the root mean square of all exact rows."""
        import torch

        exact = [self._exact[step, layer] for step in range(len(self.schedule.steps))]
        return float(torch.cat(list(differences)).median() / torch.cat(exact).square().mean().sqrt())

    def _gather(self, step: int, layer: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's rows in a step's packed order, and which of them count."""
        import torch

        per_sequence = self.reference.logits if layer is None else self.reference.hidden[layer]
        pieces = self.schedule.steps[step].pieces
        total = sum(piece.end - piece.start for piece in pieces)
        rows = torch.empty(total, per_sequence[0].shape[-1])
        keep = torch.zeros(total, dtype=torch.bool)
        for piece in pieces:
            where = torch.from_numpy(piece.rows).long()
            rows[where] = per_sequence[piece.sequence][piece.start : piece.end]
            keep[where] = self.reference.margins[piece.sequence][piece.start : piece.end] >= self.margin
        return rows, keep


def _count(items: Iterator[T], progress: Progress) -> Iterator[T]:
    for item in items:
        yield item
        progress.advance(1)


def _logits(events: Iterator[Event], progress: Progress) -> Iterator[torch.Tensor]:
    return (event.rows for event in _count(events, progress) if event.layer is None)


def _largest(difference: torch.Tensor, keep: torch.Tensor) -> float:
    """The largest absolute value among the rows kept; infinity where anything, kept or not, is not finite."""
    import torch

    if not bool(torch.isfinite(difference).all()):
        return math.inf
    return float(difference.abs()[keep].max()) if bool(keep.any()) else 0.0
