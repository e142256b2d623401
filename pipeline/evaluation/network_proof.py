"""Proof of the network: the object that the builder compiles, executed on the CPU, against `transformers` in fp32.

Prompts are prefilled in chunks and decoded token by token, in batches of unequal lengths, in steps that mix both, over
scrambled block tables; where RoPE is scaled, one prompt stands beyond the original context. Where linears round their
inputs (FP8, SmoothQuant), or the cache is quantized, that is left out on both sides: what it costs is part of the
quality. A quantized cache is held against the wide one besides, within a bound derived from its type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.evaluation.forward import run_network
from pipeline.evaluation.proof_bounds import derive_cache_bound, derive_declared_bound, derive_payload_bound
from pipeline.evaluation.reference import Reference, compute_reference
from pipeline.evaluation.schedule import Schedule, TokenSequence, schedule_prompts
from pipeline.network.spec import Lowering
from pipeline.network.widening import widen, widen_inputs

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.evaluation.parallel_proof import RankNetworks
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProof:
    """Both in fp32, the largest absolute differences of logits: from `transformers`, and from the network with plugins;
    infinite where no position was compared."""

    plugins: tuple[str, ...]
    max_logit_error: float
    max_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingProof:
    """What it changes that something is held or sent in `kind`: a position's RMS difference of the logits, all in fp32,
    from those without, over the RMS of all: the median position's."""

    kind: str
    error: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProof:
    """The same of the networks of `world` ranks together: from `transformers`, and from the network of one rank."""

    world: int
    max_logit_error: float
    max_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProof:
    """Largest absolute differences from `transformers` at the `positions` compared, infinite where there were none;
    `left_out` counts positions where a router's choice was closer than the margin.

    `declared_error` is a position's RMS difference of the declared-type logits from the exact ones over the RMS of all
    exact ones: the median position's, since where a rounding tips a router to another expert the difference says
    nothing of rounding. `declared_layer_errors` is the same of each layer's output.

    Of a network with plugins, `native` says how the same network without any did, `cache` what a quantized cache
    changes; of a parallel model, `ranks` how its ranks' did, `native_ranks` without the plugin by which they exchange
    rows, and `payload` what it changes that they do in FP8."""

    max_logit_error: float
    layer_errors: list[float]
    positions: int
    left_out: int
    declared_error: float
    declared_layer_errors: list[float]
    declared_bound: float
    steps: int
    mixed_steps: int
    native: NativeProof | None = None
    cache: RoundingProof | None = None
    ranks: RanksProof | None = None
    native_ranks: RanksProof | None = None
    payload: RoundingProof | None = None

    @property
    def worst_layer(self) -> int:
        return find_worst(self.layer_errors)

    @property
    def worst_declared_layer(self) -> int:
        return find_worst(self.declared_layer_errors)


def find_worst(errors: Sequence[float]) -> int:
    """The first layer whose error is not finite, else the one that adds most to what it was given."""
    growth = [after - before for before, after in itertools.pairwise([0.0, *errors])]
    return next((i for i, error in enumerate(errors) if not math.isfinite(error)), growth.index(max(growth)))


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
        run_network,
        source,
        architecture,
        steps=schedule.steps,
        num_blocks=schedule.num_blocks,
        segments=segments,
    )
    layers = architecture.num_layers
    worst: dict[int | None, float] = {}
    compared = 0
    exact: dict[tuple[int, int | None], torch.Tensor] = {}
    progress.start("network, exact", len(schedule.steps) * (layers + 1), "layers")
    for event in run(spec=spec, mode="exact", widen=widen):
        wanted, keep = _gather(reference, schedule, event.step, event.layer, router_margin)
        exact[event.step, event.layer] = event.rows
        worst[event.layer] = max(worst.get(event.layer, 0.0), _largest(event.rows - wanted, keep))
        compared += int(keep.sum()) if event.layer is None else 0
        progress.advance(1)
    differences: dict[int | None, list[torch.Tensor]] = {}
    progress.start(f"network, {spec.dtype}", len(schedule.steps) * (layers + 1), "layers")
    for event in run(spec=spec, mode="declared", widen=widen):
        difference = (event.rows.float() - exact[event.step, event.layer]).square().mean(-1).sqrt()
        differences.setdefault(event.layer, []).append(difference)
        progress.advance(1)
    declared = {
        layer: _median_share(rows, [exact[step, layer] for step in range(len(schedule.steps))])
        for layer, rows in differences.items()
    }

    def advance(done: T) -> T:
        progress.advance(1)
        return done

    def compare(logits: Iterator[torch.Tensor]) -> dict[str, float]:
        error = apart = 0.0 if compared else math.inf
        for step, rows in enumerate(logits):
            wanted, keep = _gather(reference, schedule, step, None, router_margin)
            error = max(error, _largest(rows - wanted, keep))
            apart = max(apart, _largest(rows - exact[step, None], keep))
            progress.advance(1)
        return {"max_logit_error": error, "max_difference": apart}

    def measure(logits: Iterator[torch.Tensor]) -> float:
        """What rounding changes: see RoundingProof."""
        rounded = [(rows - exact[step, None]).square().mean(-1).sqrt() for step, rows in enumerate(logits)]
        return _median_share(rounded, [exact[step, None] for step in range(len(schedule.steps))])

    native = None
    if spec.lowering.plugins():
        progress.start("network without plugins", len(schedule.steps), "steps")
        events = run(spec=replace(spec, lowering=Lowering(), kv_cache="model"), mode="exact", widen=widen)
        found = compare(event.rows for event in events if event.layer is None)
        native = NativeProof(plugins=spec.lowering.plugins(), **found)
    cache = None
    if spec.kv_cache != "model":
        progress.start(f"network, {spec.kv_cache} cache", len(schedule.steps) * (layers + 1), "layers")
        events = (advance(event) for event in run(spec=spec, mode="exact", widen=widen_inputs))
        error = measure(event.rows for event in events if event.layer is None)
        cache = RoundingProof(kind=spec.kv_cache, error=error, bound=derive_cache_bound(architecture))

    def run_ranks(ranks: RankNetworks | None, how: str = "") -> RanksProof | None:
        if ranks is None:
            return None
        progress.start(f"networks of {ranks.parallel.world} ranks{how}", len(schedule.steps), "steps")
        return RanksProof(world=ranks.parallel.world, **compare(ranks.run(schedule, segments)))

    payload = None
    if ranks and (sending := ranks.rounded):
        told = f"networks of {ranks.parallel.world} ranks, {ranks.spec.expert_payload} rows"
        progress.start(told, len(schedule.steps), "steps")
        error = measure(map(advance, sending.run(schedule, segments)))
        payload = RoundingProof(kind=ranks.spec.expert_payload, error=error, bound=derive_payload_bound(architecture))
    return NetworkProof(
        max_logit_error=worst[None] if compared else math.inf,
        layer_errors=[worst[layer] for layer in range(layers)],
        positions=compared,
        left_out=sum(len(sequence.tokens) for sequence in sequences) - compared,
        declared_error=declared[None],
        declared_layer_errors=[declared[layer] for layer in range(layers)],
        declared_bound=derive_declared_bound(architecture, spec),
        steps=len(schedule.steps),
        native=native,
        cache=cache,
        ranks=run_ranks(ranks),
        native_ranks=run_ranks(ranks.native if ranks else None, " without plugins"),
        payload=payload,
        mixed_steps=sum(len({p.end - p.start > 1 for p in step.pieces}) == 2 for step in schedule.steps),
    )


def _largest(difference: torch.Tensor, keep: torch.Tensor) -> float:
    """The largest absolute value among the rows kept; infinity where anything, kept or not, is not finite."""
    import torch

    if not bool(torch.isfinite(difference).all()):
        return math.inf
    return float(difference.abs()[keep].max()) if bool(keep.any()) else 0.0


def _median_share(differences: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The median row's difference over the root mean square of all exact rows."""
    import torch

    return float(torch.cat(list(differences)).median() / torch.cat(list(exact)).square().mean().sqrt())


def _gather(
    reference: Reference, schedule: Schedule, step: int, layer: int | None, margin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's rows in a step's packed order, and which of them count."""
    import torch

    per_sequence = reference.logits if layer is None else reference.hidden[layer]
    pieces = schedule.steps[step].pieces
    total = sum(piece.end - piece.start for piece in pieces)
    rows = torch.empty(total, per_sequence[0].shape[-1])
    keep = torch.zeros(total, dtype=torch.bool)
    for piece in pieces:
        where = torch.from_numpy(piece.rows).long()
        rows[where] = per_sequence[piece.sequence][piece.start : piece.end]
        keep[where] = reference.margins[piece.sequence][piece.start : piece.end] >= margin
    return rows, keep
