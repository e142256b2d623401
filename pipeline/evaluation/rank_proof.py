"""Proof of rank checkpoints: the model that they make together is the engine checkpoint's, tensor by tensor and in its
logits. What reads them knows TensorRT-LLM's layout and nothing of how they were written.

Three things may differ, each checked to be no more than what it must be: a scale that TensorRT-LLM holds in the model's
type is the engine checkpoint's rounded to it; of two FP8 weights that share a scale, one was rounded again; and where
the engine checkpoint has no scale of a linear's input, that is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.rows import MTP_PREFIX
from pipeline.checkpoint.layouts.scales import CHANNEL_SCALES, PRESCALE, WEIGHT_SCALES
from pipeline.checkpoint.tensors import DTYPES, RawTensor
from pipeline.evaluation.forward import run_network
from pipeline.evaluation.rank_checkpoint import RankCheckpoint
from pipeline.evaluation.rank_joining import bits
from pipeline.evaluation.rank_source import JoinedRanks
from pipeline.evaluation.schedule import TokenSequence, schedule_windows
from pipeline.network.spec import NetworkSpec
from pipeline.network.widening import widen
from pipeline.progress import SILENT, Progress

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import TensorSource

EMBEDDING, HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"
BLOCK = 16  # rows of a cache block in the comparison of logits
ROUTER = "mlp.router.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProof:
    """differing: engine tensors that the ranks do not reproduce, with how many elements differ (-1: there is none to
    compare); unknown ones of the ranks, too. rounded: those of which the module's text allows a difference, with the
    largest relative one. logits: the RMS difference over the RMS of the engine checkpoint's, zero unless any are
    rounded; tokens: of how many positions."""

    ranks: int
    tensors: int
    elements: int
    differing: dict[str, int]
    rounded: dict[str, float]
    logits: float
    tokens: int

    @property
    def holds(self) -> bool:
        return not self.differing and (self.logits == 0 or (bool(self.rounded) and math.isfinite(self.logits)))


def prove_ranks(
    folder: Path, engine: CheckpointFolder, *, sm: int, tokens: int = 16, progress: Progress = SILENT
) -> RankProof:
    """Holds the rank checkpoints in `folder` against the engine checkpoint that they were written from. `sm`: as they
    were written for. Memory is one linear's, then one decoder layer's.

    Raises CheckpointError for what TensorRT-LLM's loader would refuse, and for ranks that contradict each other.
    """
    checkpoint = RankCheckpoint(folder)
    joined = JoinedRanks(checkpoint, sm)
    expected = [name for name in engine.tensors if not name.startswith(MTP_PREFIX)]
    progress.start("rank proof", sum(engine.tensors[name].nbytes for name in expected), "B")
    differing: dict[str, int] = {}
    rounded: dict[str, float] = {}
    elements = 0
    for name in expected:
        if name not in joined.tensors:
            differing[name] = -1
            continue
        elements += _compare(name, engine, joined, differing, rounded)
        engine.release(name)
        progress.advance(engine.tensors[name].nbytes)
    for name in joined.tensors.keys() - set(expected):
        _judge_added(name, engine, joined, differing)
    error = _compare_logits(engine, joined, tokens, progress) if not differing and tokens else 0.0
    return RankProof(
        ranks=len(checkpoint.files),
        tensors=len(expected),
        elements=elements,
        differing=differing,
        rounded=rounded,
        logits=error,
        tokens=tokens if not differing else 0,
    )


def _compare(
    name: str, engine: TensorSource, joined: JoinedRanks, differing: dict[str, int], rounded: dict[str, float]
) -> int:
    """Elements of an engine tensor; notes what the ranks have in its place."""
    import numpy as np
    import torch

    wanted, found = engine.read(name), joined.read(name)
    if (wanted.dtype, wanted.shape) == (found.dtype, found.shape) and np.array_equal(wanted.data, found.data):
        return wanted.to_torch().numel()
    a, b = wanted.to_torch(), found.to_torch()
    base, _, kind = name.rpartition(".")
    if a.shape != b.shape:
        differing[name] = a.numel()
    elif kind == CHANNEL_SCALES or name.endswith(ROUTER):
        kept = a.float() if kind != CHANNEL_SCALES else a.to(getattr(torch, joined.contract.config["dtype"])).float()
        _note(name, int((kept != b).sum()), _relative(a.float(), b.float()), differing, rounded)
    elif _is_fused(base) and kind in ("weight", WEIGHT_SCALES) and wanted.dtype == found.dtype:
        wrong, error = _compare_fp8(base, engine, joined)
        _note(name, wrong, error, differing, rounded)
    else:
        differing[name] = int((bits(a) != bits(b)).sum()) if a.dtype == b.dtype else a.numel()
    return a.numel()


def _note(name: str, wrong: int, error: float, differing: dict[str, int], rounded: dict[str, float]) -> None:
    if wrong:
        differing[name] = wrong
    elif error:
        rounded[name] = error


def _compare_fp8(base: str, engine: TensorSource, joined: JoinedRanks) -> tuple[int, float]:
    """Of a weight under another scale: the values that are not the nearest E4M3 multiples of it, and how far the whole
    went. E4M3 has 3 bits of fraction, and below 2^-6 steps of 2^-9 (arXiv 2209.05433)."""
    values = []
    for source in (engine, joined):
        q = source.read(f"{base}.weight").to_torch().float()
        values.append((q, source.read(f"{base}.{WEIGHT_SCALES}").to_torch().float()))
    (q, scale), (other, shared) = values
    if float(shared) < float(scale):  # a scale may only grow to the larger of both halves
        return q.numel(), math.inf
    exact = q.double() * (float(scale) / float(shared))
    step = exact.abs().clamp(min=2.0**-6).log2().floor().sub(3).exp2()
    wrong = (other - exact).abs() > step / 2 * (1 + 1e-6)
    return int(wrong.sum()), _relative(q * scale, other * shared)


def _is_fused(base: str) -> bool:
    """Whether the linear is a half of, or stacked into, what TensorRT-LLM's MoE layers hold."""
    return ".mlp.experts." in base or ".mlp.shared_expert." in base


def _relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=1e-30))


def _judge_added(name: str, engine: CheckpointFolder, joined: JoinedRanks, differing: dict[str, int]) -> None:
    """A tensor that only the ranks have: a scale of one, or the head of a model that shares it with the embedding."""
    import torch

    found = joined.read(name).to_torch()
    if name.endswith(f".{PRESCALE}"):
        wrong = int((found != 1).sum())
    elif name == HEAD and engine.architecture.tie_word_embeddings:
        wrong = int((found != engine.read(EMBEDDING).to_torch()).sum())
    else:
        wrong = -1
    if wrong or not torch.isfinite(found.float()).all():
        differing[name] = wrong


def _compare_logits(engine: CheckpointFolder, joined: JoinedRanks, tokens: int, progress: Progress) -> float:
    import torch

    a = engine.architecture
    spec = NetworkSpec(dtype=a.dtype, max_seq_len=max(tokens, BLOCK), block_size=BLOCK)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, a.vocab_size, (tokens,), generator=generator).tolist()
    schedule = schedule_windows([TokenSequence(tokens=tuple(drawn))], batch=1, block_size=BLOCK)
    logits = []
    progress.start("rank proof, logits", 2 * (a.num_layers + 1), "layers")
    for source in (engine, _Network(joined, engine)):
        for event in run_network(
            source,
            a,
            spec,
            schedule.steps,
            num_blocks=schedule.num_blocks,
            mode="exact",
            segments=[(layer, layer + 1) for layer in range(a.num_layers)],
            widen=widen,
        ):
            progress.advance(1)
            if event.layer is None:
                logits.append(event.rows)
    difference = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    return float(difference)


class _Network:
    """What the ranks hold as the network takes it: the router in the model's type, which TensorRT-LLM holds in float32;
    no head of a model that shares it with its embedding."""

    def __init__(self, joined: JoinedRanks, engine: CheckpointFolder) -> None:
        self.joined = joined
        self.tensors = {
            name: engine.tensors[name] if name.endswith(ROUTER) else info
            for name, info in joined.tensors.items()
            if name != HEAD or HEAD in engine.tensors
        }

    def read(self, name: str) -> RawTensor:
        raw, dtype = self.joined.read(name), self.tensors[name].dtype
        if raw.dtype == dtype:
            return raw
        import torch

        return RawTensor.from_torch(raw.to_torch().to(getattr(torch, DTYPES[dtype][1])))
