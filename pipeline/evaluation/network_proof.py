"""Proof of the network: the object that the builder compiles, executed on the CPU, against `transformers` in fp32.

Prompts are prefilled in chunks and decoded token by token, in batches of unequal lengths, in steps that mix both, over
scrambled block tables; where RoPE is scaled, one prompt stands beyond the original context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.forward import run_network
from pipeline.evaluation.reference import Reference, compute_reference
from pipeline.evaluation.schedule import Schedule, TokenSequence, schedule_prompts

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

# Unit roundoff of the declared type.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Roundings of one value on its way through a decoder layer, counted in the network: norm, its weight, q/k/v, RoPE,
# cache, scale, attention, output projection, residual; norm, its weight, two projections, SiLU, product, down
# projection, residual; in a routed layer also the experts' weighted sum.
ROUNDINGS_PER_LAYER = 18
# What layers may amplify: norms divide by less than one, softmax is not linear.
AMPLIFICATION = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProof:
    """Largest absolute differences from `transformers` at compared positions; `left_out` counts positions where a
    router's choice was closer than the margin. `declared_error` is a position's RMS difference of the declared-type
    logits from the exact ones over the RMS of all exact ones: the median position's, since where a rounding tips a
    router to another expert the difference says nothing of rounding."""

    max_logit_error: float
    layer_errors: list[float]
    positions: int
    left_out: int
    declared_error: float
    declared_bound: float
    steps: int
    mixed_steps: int

    @property
    def worst_layer(self) -> int:
        return self.layer_errors.index(max(self.layer_errors))


def derive_declared_bound(architecture: Architecture, spec: NetworkSpec) -> float:
    """Bound on `declared_error`: with R independent roundings of unit roundoff u on the way, errors add as u·sqrt(R)
    (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019), times AMPLIFICATION."""
    roundings = ROUNDINGS_PER_LAYER * architecture.num_layers + 2
    return AMPLIFICATION * UNIT_ROUNDOFF[spec.dtype] * math.sqrt(roundings)


def make_sequences(
    prompts: Sequence[Sequence[int]], *, decode_tokens: int, architecture: Architecture, max_seq_len: int
) -> list[TokenSequence]:
    """Each prompt followed by `decode_tokens` forced tokens (its own, over again), cut to what the engine can hold. The
    first one is also taken past the original context, where RoPE scaling states one that max_seq_len exceeds."""
    sequences = []
    for prompt in prompts:
        kept = tuple(prompt)[: max_seq_len - decode_tokens]
        forced = tuple(kept[i % len(kept)] for i in range(decode_tokens))
        sequences.append(TokenSequence(tokens=kept + forced, prefill=len(kept)))
    original = int(architecture.rope.get("original_max_position_embeddings", 0))
    first = sequences[0]
    if original and original + len(first.tokens) <= max_seq_len:
        sequences.append(TokenSequence(tokens=first.tokens, prefill=first.prefill, offset=original))
    return sequences


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
) -> NetworkProof:
    """Runs both sides. `segments` says whether the network is taken whole, [(0, L)], or in slices."""
    import torch

    with torch.inference_mode():
        reference = compute_reference(source, config, architecture, sequences, progress)
    schedule = schedule_prompts(sequences, prefill_chunk=prefill_chunk, block_size=spec.block_size)
    run = partial(
        run_network,
        source,
        architecture,
        spec,
        schedule.steps,
        num_blocks=schedule.num_blocks,
        segments=segments,
    )
    layer_errors = [0.0] * architecture.num_layers
    logit_error = 0.0
    exact: dict[int, torch.Tensor] = {}
    progress.start("network, exact", len(schedule.steps) * (architecture.num_layers + 1), "layers")
    for event in run(mode="exact"):
        wanted, keep = _gather(reference, schedule, event.step, event.layer, router_margin)
        error = float((event.rows - wanted).abs()[keep].max()) if keep.any() else 0.0
        error = error if bool(torch.isfinite(event.rows).all()) else math.inf
        if event.layer is None:
            exact[event.step] = event.rows
            logit_error = max(logit_error, error)
        else:
            layer_errors[event.layer] = max(layer_errors[event.layer], error)
        progress.advance(1)
    differences: list[torch.Tensor] = []
    progress.start(f"network, {spec.dtype}", len(schedule.steps) * (architecture.num_layers + 1), "layers")
    for event in run(mode="declared"):
        progress.advance(1)
        if event.layer is None:
            differences.append((event.rows.float() - exact[event.step]).square().mean(-1).sqrt())
    left_out = sum(int((margin < router_margin).sum()) for margin in reference.margins)
    return NetworkProof(
        max_logit_error=logit_error,
        layer_errors=layer_errors,
        positions=sum(len(s.tokens) for s in sequences) - left_out,
        left_out=left_out,
        declared_error=float(torch.cat(differences).median() / torch.cat(list(exact.values())).square().mean().sqrt()),
        declared_bound=derive_declared_bound(architecture, spec),
        steps=len(schedule.steps),
        mixed_steps=sum(len({p.end - p.start > 1 for p in step.pieces}) == 2 for step in schedule.steps),
    )


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
