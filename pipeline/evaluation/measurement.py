"""Several checkpoints of one model over the same text, in lockstep: a decoder layer of each in memory at a time.

Every checkpoint is run by the interpreter in exact arithmetic, so that what differs is the checkpoints' own doing.
Layer by layer their hidden states are held against the first one's, at last their logits; nothing of the size of
(tokens x vocabulary) is kept, and hidden states between layers go to a file where they are many. Long texts are
prefilled in chunks over the paged pool, so that attention never holds more than (chunk x context).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.forward import RESIDENT_BYTES, Event, run_network
from pipeline.evaluation.lens import Lens
from pipeline.evaluation.schedule import Schedule, TokenSequence, schedule_windows
from pipeline.evaluation.scores import Scores, Tally, doubling_edges, read_original, score

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress

MAX_LOGITS = 1 << 25  # elements of one step's logits: 128 MB in fp32, for each of the few copies alive at once
MAX_SCORES = 1 << 26  # elements of one step's attention scores
MAX_BATCH, MAX_CHUNK = 8, 1024
# Prepared weights of all checkpoints together, so that a third one beside two makes a large model slower, not larger.
LOCKSTEP_BYTES = 2 * RESIDENT_BYTES
LENS_ROWS = 16  # positions of each step that the lens looks at
BLOCK_SIZE = 64


@dataclass(slots=True)
class LayerTally:
    """Sums over positions of the states after each layer [L]; `lens`: of what the lens reads in a sample of them."""

    difference: list[float]
    norm: list[float]
    cosine: list[float]
    rows: list[int]
    lens: list[Tally]

    @classmethod
    def of(cls, layers: int) -> LayerTally:
        lens = [Tally((1,)) for _ in range(layers)]
        return cls([0.0] * layers, [0.0] * layers, [0.0] * layers, [0] * layers, lens)

    @property
    def error(self) -> list[float]:
        """Relative RMS difference of the hidden states from the original's."""
        pairs = zip(self.difference, self.norm, strict=True)
        return [math.sqrt(difference / norm) if norm else 0.0 for difference, norm in pairs]

    def to_json(self) -> list[dict[str, float]]:
        """`lens_positions`: how many of the positions kl, top1 and top5 are of; error and cosine are of all."""
        return [
            {
                "layer": layer,
                "error": self.error[layer],
                "cosine": self.cosine[layer] / self.rows[layer] if self.rows[layer] else math.nan,
                **{name: self.lens[layer].mean(name) for name in ("kl", "top1", "top5")},
                "lens_positions": self.lens[layer].tokens,
            }
            for layer in range(len(self.rows))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The position of a sequence where a checkpoint's KL is largest: the token after it is where that one and the
    original disagree most. `label` is the checkpoint's."""

    label: str
    sequence: int
    place: int
    kl: float

    @property
    def badness(self) -> float:
        """KL, by which peaks are ordered: what is not finite is the worst."""
        return self.kl if math.isfinite(self.kl) else math.inf


@dataclass(slots=True)
class Measure:
    """One checkpoint against the original (against itself: zero distances, and its own perplexity)."""

    label: str
    tally: Tally
    layers: LayerTally
    peaks: dict[int, Peak] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        t = self.tally
        return {
            "label": self.label,
            "tokens": t.tokens,
            "perplexity": t.perplexity,
            "entropy": t.mean("entropy"),
            "mean_kl": t.mean("kl"),
            "max_kl": t.max_kl,
            "top1_agreement": t.mean("top1"),
            "top5_overlap": t.mean("top5"),
            "top1_in_top5": t.mean("top1_in_top5"),
            "positions": t.buckets(),
            "layers": self.layers.to_json(),
        }


def find_peaks(measures: Sequence[Measure], count: int) -> list[Peak]:
    """The worst positions of all checkpoints, at most one of each sequence, the worst first; none where nothing
    differs."""
    worst: dict[int, Peak] = {}
    for peak in (peak for each in measures for peak in each.peaks.values()):
        known = worst.get(peak.sequence)
        if peak.badness > 0 and (known is None or peak.badness > known.badness):
            worst[peak.sequence] = peak
    return sorted(worst.values(), key=lambda peak: (-peak.badness, peak.sequence))[:count]


def measure(
    subjects: Sequence[Subject],
    sequences: Sequence[TokenSequence],
    progress: Progress,
    *,
    edges: Sequence[int] | None = None,
    by_layer: bool = True,
    folder: Path | None = None,
    item: str = "quality",
    block_size: int = BLOCK_SIZE,
    chunk: int | None = None,
) -> list[Measure]:
    """Runs all checkpoints over `sequences`; the first is the original. `edges` are the ends of the buckets of places
    (default: doubling), `by_layer` asks for the comparison of hidden states too, `folder` is for large activations,
    `chunk` bounds a step's tokens further than memory does."""
    architecture = subjects[0].architecture
    schedule = plan_schedule(sequences, architecture, block_size=block_size, chunk=chunk)
    longest = max(len(sequence.tokens) for sequence in sequences)
    layers = architecture.num_layers
    measures = [
        Measure(subject.label, Tally(edges or doubling_edges(longest)), LayerTally.of(layers)) for subject in subjects
    ]
    lenses = [Lens(subject) for subject in subjects] if by_layer else []
    progress.start(item, sum(len(s.tokens) for s in sequences) * (layers + 1), "token layers")
    for events in run_lockstep(subjects, schedule, block_size=block_size, folder=folder):
        step = schedule.steps[events[0].step]
        if events[0].layer is None:
            following = step.next_tokens(sequences)
            original = read_original(events[0].rows[following.rows], following.targets)
            for i, (each, event) in enumerate(zip(measures, events, strict=True)):
                scores = score(original, event.rows[following.rows] if i else None)
                each.tally.add(scores, following.places)
                _keep_peaks(each, scores, following.owners, following.places)
        elif by_layer:
            _compare_states(measures, events, lenses)
        progress.advance(len(events[0].rows))
    return measures


def run_lockstep(
    subjects: Sequence[Subject], schedule: Schedule, *, block_size: int, folder: Path | None = None
) -> Any:
    """Yields, layer by layer and step by step, one event of each checkpoint."""
    longest = max(len(sequence.tokens) for sequence in schedule.sequences)
    segments = [(layer, layer + 1) for layer in range(subjects[0].architecture.num_layers)]
    runs = [
        run_network(
            subject.source,
            subject.architecture,
            subject.network(longest, block_size),
            schedule.steps,
            num_blocks=schedule.num_blocks,
            mode="exact",
            segments=segments,
            folder=folder,
            resident_bytes=min(RESIDENT_BYTES, LOCKSTEP_BYTES // len(subjects)),
        )
        for subject in subjects
    ]
    return zip(*runs, strict=True)


def plan_schedule(
    sequences: Sequence[TokenSequence], architecture: Architecture, *, block_size: int, chunk: int | None = None
) -> Schedule:
    """As many sequences at once, in chunks as long, as the bounds on logits and attention scores allow."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    size = min(
        longest,
        chunk or MAX_CHUNK,
        max(1, MAX_LOGITS // architecture.vocab_size),
        max(1, MAX_SCORES // (architecture.num_heads * longest)),
    )
    rows = min(MAX_LOGITS // architecture.vocab_size, MAX_SCORES // (architecture.num_heads * longest))
    batch = max(1, min(MAX_BATCH, rows // size)) if size == longest else 1
    return schedule_windows(sequences, batch=batch, block_size=block_size, chunk=size)


def _compare_states(measures: Sequence[Measure], events: Sequence[Event], lenses: Sequence[Lens]) -> None:
    import torch

    layer, states = events[0].layer, events[0].rows.float()
    assert layer is not None
    stride = max(1, len(states) // LENS_ROWS)
    nowhere = torch.zeros(len(states[::stride]), dtype=torch.int64)
    original = read_original(lenses[0].read(states[::stride]), nowhere)  # the lens has no next token to score
    size = states.norm(dim=-1)
    for i, (each, event) in enumerate(zip(measures, events, strict=True)):
        other, tally = event.rows.float(), each.layers
        tally.difference[layer] += float((other - states).square().sum(dtype=torch.float64))
        tally.norm[layer] += float(states.square().sum(dtype=torch.float64))
        cosine = (states * other).sum(-1) / (size * other.norm(dim=-1)).clamp_min(1e-30)
        tally.cosine[layer] += float(cosine.sum(dtype=torch.float64))
        tally.rows[layer] += len(states)
        tally.lens[layer].add(score(original, lenses[i].read(other[::stride]) if i else None), nowhere)


def _keep_peaks(measure: Measure, scores: Scores, owners: torch.Tensor, places: torch.Tensor) -> None:
    """The largest KL of each sequence of this step, if it is larger than what was seen of the sequence before."""
    found = zip(owners.tolist(), places.tolist(), scores.kl.tolist(), strict=True)
    for sequence, group in itertools.groupby(found, key=lambda row: row[0]):
        _, place, kl = max(group, key=lambda row: row[2] if math.isfinite(row[2]) else math.inf)
        known, peak = measure.peaks.get(sequence), Peak(label=measure.label, sequence=sequence, place=place, kl=kl)
        if known is None or peak.badness > known.badness:
            measure.peaks[sequence] = peak
