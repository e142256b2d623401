"""What quantization costs: the quantized network against the original one, in the interpreter, on held-out text.

Both networks run in lockstep over the same windows, a slice of one decoder layer at a time, so that a model of any size
needs two layers in memory and nothing of the size of (tokens x vocabulary) is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.errors import QuantizationError
from pipeline.evaluation.forward import run_network
from pipeline.evaluation.network_proof import find_worst
from pipeline.evaluation.schedule import TokenSequence, schedule_windows

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

MAX_LOGITS = 1 << 25  # elements of one step's logits: 128 MB in fp32, for each of the few copies alive at once


@dataclass(slots=True)
class Quality:
    """Sums over scored positions; `layer_error[l]`: relative RMS difference of the hidden states after layer l."""

    tokens: int = 0
    nll_original: float = 0.0
    nll_quantized: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    top1: int = 0
    top5: int = 0  # positions whose original top token is among the quantized network's five best
    layer_difference: list[float] = field(default_factory=list)
    layer_norm: list[float] = field(default_factory=list)

    @property
    def perplexity_original(self) -> float:
        return _perplexity(self.nll_original / self.tokens)

    @property
    def perplexity_quantized(self) -> float:
        return _perplexity(self.nll_quantized / self.tokens)

    @property
    def layer_error(self) -> list[float]:
        pairs = zip(self.layer_difference, self.layer_norm, strict=True)
        return [math.sqrt(difference / norm) if norm else 0.0 for difference, norm in pairs]

    @property
    def worst_layer(self) -> int:
        """The layer that adds the most error to what it was given."""
        return find_worst(self.layer_error)

    def to_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "perplexity_original": self.perplexity_original,
            "perplexity_quantized": self.perplexity_quantized,
            "mean_kl": self.kl / self.tokens,
            "max_kl": self.max_kl,
            "top1_agreement": self.top1 / self.tokens,
            "top1_in_top5": self.top5 / self.tokens,
            "layer_error": self.layer_error,
        }


def _perplexity(nll: float) -> float:
    return math.inf if nll > 700 else math.exp(nll)  # a double overflows beyond


def cut_windows(
    tokens: Sequence[int], *, total: int, window: int, origin: str, first: Sequence[int] = ()
) -> list[TokenSequence]:
    """Pieces of `window` tokens, together at most `total`, each beginning with `first` (a BOS, as calibration has it).
    Raises QuantizationError where the text is too short."""
    size = window - len(first)
    count = min(total // window, len(tokens) // size)
    if count == 0:
        raise QuantizationError(
            f"{origin}: {len(tokens)} tokens of held-out text, fewer than one window of {window}",
            hint="name more text under stages.verify.heldout.files, or lower heldout.window and heldout.tokens",
        )
    return [TokenSequence(tokens=(*first, *tokens[i * size : (i + 1) * size])) for i in range(count)]


def compare(
    original: TensorSource,
    quantized: TensorSource,
    architecture: Architecture,
    spec: NetworkSpec,
    windows: Sequence[TokenSequence],
    progress: Progress,
) -> Quality:
    """Runs both engine checkpoints over `windows` in exact mode (so that the difference is quantization's alone)."""
    length = max(len(w.tokens) for w in windows)
    batch = max(1, min(8, MAX_LOGITS // (length * architecture.vocab_size)))
    schedule = schedule_windows(windows, batch=batch, block_size=spec.block_size)
    segments = [(layer, layer + 1) for layer in range(architecture.num_layers)]
    runs = [
        run_network(
            source,
            architecture,
            spec,
            schedule.steps,
            num_blocks=schedule.num_blocks,
            mode="exact",
            segments=segments,
        )
        for source in (original, quantized)
    ]
    layers = architecture.num_layers
    quality = Quality(layer_difference=[0.0] * layers, layer_norm=[0.0] * layers)
    progress.start("quantized against original", len(schedule.steps) * (layers + 1), "steps")
    for ours, theirs in zip(*runs, strict=True):
        if ours.layer is None:
            step = schedule.steps[ours.step]
            targets, rows = step.next_tokens(schedule.sequences)
            _score(quality, ours.rows[rows], theirs.rows[rows], targets)
        else:
            difference = (theirs.rows - ours.rows).double()
            quality.layer_difference[ours.layer] += float(difference.square().sum())
            quality.layer_norm[ours.layer] += float(ours.rows.double().square().sum())
        progress.advance(1)
    return quality


def _score(quality: Quality, original: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> None:
    """Adds one step's logits [N, V] at positions whose next token `targets` [N] is known."""
    import torch

    p, q = torch.log_softmax(original.float(), -1), torch.log_softmax(quantized.float(), -1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    best = original.argmax(-1, keepdim=True)
    quality.tokens += len(targets)
    quality.nll_original -= float(p.gather(-1, targets[:, None]).double().sum())
    quality.nll_quantized -= float(q.gather(-1, targets[:, None]).double().sum())
    quality.kl += float(kl.double().sum())
    quality.max_kl = max(quality.max_kl, float(kl.max()))
    quality.top1 += int((quantized.argmax(-1, keepdim=True) == best).sum())
    quality.top5 += int((quantized.topk(min(5, quantized.shape[-1]), -1).indices == best).any(-1).sum())
