"""How far one distribution over the next token is from another, per position, and sums of that by place in the text.

N positions, V vocabulary. Everything is computed in float32 and summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOP = 5
# Columns of a tally, one per figure of `Scores`.
SUMS = ("nll", "entropy", "kl", "top1", "top5", "top1_in_top5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """What the original says at N positions: kept while every other checkpoint is held against it."""

    log_p: torch.Tensor  # [N, V]
    best: torch.Tensor  # [N, 5], most likely first
    targets: torch.Tensor  # [N], the tokens that follow in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per position [N]. nll, entropy and kl in nats; kl is KL(original || this one). top1: the same most likely token;
    top5: the share of the original's five most likely tokens that are among this one's five; top1_in_top5: whether the
    original's most likely token is."""

    nll: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor
    top1_in_top5: torch.Tensor


def read_original(logits: torch.Tensor, targets: torch.Tensor) -> Original:
    import torch

    log_p = torch.log_softmax(logits.float(), -1)
    return Original(log_p=log_p, best=log_p.topk(min(TOP, log_p.shape[-1]), -1).indices, targets=targets)


def score(original: Original, logits: torch.Tensor | None = None) -> Scores:
    """`logits` [N, V] at the same positions; None: the original itself."""
    import torch

    if logits is None:
        log_q, best = original.log_p, original.best
        kl = torch.zeros(len(log_q))
    else:
        log_q = torch.log_softmax(logits.float(), -1)
        best = log_q.topk(original.best.shape[-1], -1).indices
        kl = (original.log_p.exp() * (original.log_p - log_q)).sum(-1).clamp_min(0)
    shared = (original.best[:, :, None] == best[:, None, :]).any(-1)  # [N, 5]: is this one of the original's there too
    # A distribution that is not finite has no best tokens, whatever topk says: it must not look stable.
    finite = torch.isfinite(log_q.amax(-1))
    return Scores(
        nll=-log_q.gather(-1, original.targets[:, None])[:, 0],
        entropy=-(log_q.exp() * log_q).sum(-1),
        kl=kl,
        top1=(best[:, 0] == original.best[:, 0]) & finite,
        top5=shared.float().mean(-1) * finite,
        top1_in_top5=shared[:, 0] & finite,
    )


class Tally:
    """Sums of scores, by the place of the position in its text: bucket i holds places in [edges[i-1], edges[i])."""

    def __init__(self, edges: Sequence[int]) -> None:
        """`edges`: ends of the buckets, ascending; places beyond the last are counted in the last."""
        import torch

        self.edges = tuple(edges)
        self.counts = torch.zeros(len(edges), dtype=torch.int64)
        self.sums = torch.zeros(len(edges), len(SUMS), dtype=torch.float64)
        self.max_kl = 0.0

    def add(self, scores: Scores, places: torch.Tensor) -> None:
        """`places` [N]: how many tokens stand before each position's own."""
        import torch

        if not len(places):
            return
        buckets = torch.bucketize(places, torch.tensor(self.edges[:-1], dtype=torch.int64), right=True)
        values = torch.stack([getattr(scores, name).double() for name in SUMS], -1)
        self.sums.index_add_(0, buckets, values)
        self.counts += torch.bincount(buckets, minlength=len(self.edges))
        self.max_kl = _larger(self.max_kl, float(scores.kl.max()))

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def mean(self, name: str, bucket: int | None = None) -> float:
        """Of one figure, over every position or those of a bucket; NaN where there are none."""
        column = self.sums[:, SUMS.index(name)]
        if bucket is None:
            return float(column.sum()) / self.tokens if self.tokens else math.nan
        return float(column[bucket]) / int(self.counts[bucket]) if self.counts[bucket] else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.mean("nll"))

    def buckets(self) -> list[dict[str, float]]:
        """A record per bucket that holds anything: its span [first, last), and the means in it."""
        spans = zip((0, *self.edges), self.edges, self.counts.tolist(), strict=False)
        return [
            {"first": first, "last": last, "tokens": count} | {name: self.mean(name, i) for name in SUMS}
            for i, (first, last, count) in enumerate(spans)
            if count
        ]


def perplexity(nll: float) -> float:
    return math.inf if nll > 700 else math.exp(nll)  # a double overflows beyond


def doubling_edges(length: int, first: int = 16) -> tuple[int, ...]:
    """16, 32, 64, … up to the first that holds a text of `length` tokens."""
    edges = [first]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return tuple(edges)


def _larger(one: float, other: float) -> float:
    """The larger, or NaN where one is: max() would hide it."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
