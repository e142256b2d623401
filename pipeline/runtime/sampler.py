"""Chooses the next token of many sequences at once, on whatever device the logits are. `sampling.py` says what and why.

Shapes: N rows, V vocabulary, K candidates. Every operation works on each row by itself, so that a row's token does not
depend on its neighbours; equal logits are ordered by token, so that it does not depend on how they were found either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.runtime.history import History

NO_TOKEN = -1
# Candidates looked at for a nucleus without top_k. Where they do not reach top_p, more are, and then all.
NUCLEUS_CANDIDATES, MORE = 256, 16
# Logits drawn from at a time on a CPU: temporaries stay in its cache.
PART = 2**19


def choose_tokens(logits: Tensor, rows: Sequence[History]) -> list[int]:
    """logits [N, V] float32, finite, which stay as they are → the next token of each row; NO_TOKEN where every token is
    excluded."""
    edited = edit_logits(logits, rows)
    tokens = find_best(edited)
    width = logits.shape[-1]
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    narrow = {index for index in drawn if 0 < rows[index].sampling.top_k < width or 0 < rows[index].top_p < 1}
    for draw, indices in ((draw_narrow, sorted(narrow)), (draw_wide, [i for i in drawn if i not in narrow])):
        for part in _parts(indices, edited):
            places = torch.tensor(part, device=logits.device)
            tokens[places] = draw(edited[places], [rows[index] for index in part])
    if edited is not logits:
        tokens = torch.where(edited.amax(-1) == -torch.inf, NO_TOKEN, tokens)
    result: list[int] = tokens.tolist()
    return result


def find_best(logits: Tensor) -> Tensor:
    """[N]: the first of the highest logits. (numpy's is ten times as fast as torch's on a CPU.)"""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def edit_logits(logits: Tensor, rows: Sequence[History]) -> Tensor:
    """Bias, penalties, and -inf for what is excluded: a new tensor, or the same one where nothing is to be changed."""
    edited = [(index, row) for index, row in enumerate(rows) if row.edits]
    if not edited:
        return logits
    logits = logits.clone()
    flat, width, device = logits.view(-1), logits.shape[-1], logits.device
    for index, row in edited:
        if row.sampling.embedding_bias is not None:
            logits[index] += torch.from_numpy(row.sampling.embedding_bias).to(device)
    counted = [(index, row.sampling, row.counts) for index, row in edited if row.counts is not None]
    if counted:
        sizes = [len(counts.ids) for *_, counts in counted]
        starts = np.repeat(np.array([index * width for index, *_ in counted]), sizes)
        places = torch.from_numpy(starts + np.concatenate([counts.ids for *_, counts in counted])).to(device)
        seen = torch.from_numpy(np.concatenate([counts.counts for *_, counts in counted])).to(device)
        penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for _, s, _ in counted]
        repetition, presence, frequency = (
            torch.from_numpy(np.repeat(np.array(column, np.float32), sizes)).to(device)
            for column in zip(*penalties, strict=True)
        )
        values = flat[places]
        values = torch.where(values < 0, values * repetition, values / repetition)
        flat[places] = values - presence - frequency * seen
    excluded = [index * width + token for index, row in edited for token in row.excluded()]
    if excluded:
        flat[torch.tensor(excluded, device=device)] = -torch.inf
    return logits


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax of logits [N, V] at tokens [N]."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)


def draw_wide(logits: Tensor, rows: Sequence[History]) -> Tensor:
    """[N]: from the whole vocabulary."""
    return _invert(_keep(_Scale(logits, rows).weigh(logits), rows), rows)


def draw_narrow(logits: Tensor, rows: Sequence[History], least: int = 1) -> Tensor:
    """[N]: from each row's best, cut after top_k, then after top_p. `least`: candidates to look at."""
    device, width = logits.device, logits.shape[-1]
    limits = [min(row.sampling.top_k or width, width) for row in rows]
    count = max(least, *(NUCLEUS_CANDIDATES if limit == width else limit for limit in limits))
    if count >= width:
        return _draw_sorted(logits, rows)
    scale, cut = _Scale(logits, rows), _Cut(limits, rows, width, device)
    values, indices = logits.topk(count + 1, dim=-1)
    outside, values, indices = values[:, count:], values[:, :count], indices[:, :count]
    values, indices = _order(values, indices)
    weights = scale.weigh(values).double()
    total = scale.weigh(logits).sum(-1, keepdim=True, dtype=torch.float64) if width in limits else None
    kept, reached = cut.find(weights, total)
    # What is kept is known unless it goes on beyond the candidates, or ends among equals that do.
    last = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    tokens, by_token = indices.sort(dim=-1)
    weights = (weights * kept).gather(-1, by_token)
    chosen = tokens.gather(-1, _invert(_keep(weights, rows), rows)[:, None])[:, 0]
    open_ended = (~reached | (last == outside))[:, 0].nonzero()[:, 0]
    if len(open_ended):
        others = [rows[index] for index in open_ended.tolist()]
        chosen[open_ended] = draw_narrow(logits[open_ended], others, MORE * count)
    return chosen


def _draw_sorted(logits: Tensor, rows: Sequence[History]) -> Tensor:
    """As `draw_narrow`, without a limit to the candidates."""
    device, width = logits.device, logits.shape[-1]
    limits = [min(row.sampling.top_k or width, width) for row in rows]
    scale, cut = _Scale(logits, rows), _Cut(limits, rows, width, device)
    values = _sort(logits)
    weights = scale.weigh(logits)
    kept, _ = cut.find(scale.weigh(values).double(), weights.sum(-1, keepdim=True, dtype=torch.float64))
    number = kept.sum(-1, keepdim=True)
    last = values.gather(-1, (number - 1).clamp_(min=0))
    equal = logits == last
    inside = (logits > last) | (equal & (equal.cumsum(-1) <= number - (values > last).sum(-1, keepdim=True)))
    return _invert(_keep(weights * inside, rows), rows)


class _Scale:
    """Turns logits into weights relative to the best token's: they cannot overflow, however low the temperature."""

    def __init__(self, logits: Tensor, rows: Sequence[History]) -> None:
        best = logits.amax(-1, keepdim=True)
        self.best = torch.where(best == -torch.inf, 0.0, best)
        self.temperature = _column([row.sampling.temperature for row in rows], logits.device)

    def weigh(self, logits: Tensor) -> Tensor:
        return (logits - self.best).div_(self.temperature).exp_()


class _Cut:
    """Where each row's best end: `limits` are top_k, `width` for none."""

    def __init__(self, limits: list[int], rows: Sequence[History], width: int, device: torch.device) -> None:
        self.top_k = torch.tensor(limits, device=device)[:, None]
        self.top_p = _column([row.top_p or 1.0 for row in rows], device).double()
        self.is_limited = self.top_k < width

    def find(self, weights: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """weights [N, K] in descending order, total [N, 1] of all tokens → which are kept, the first ones of each row;
        and whether more weights could change nothing [N, 1]."""
        weights = torch.where(torch.arange(weights.shape[-1], device=weights.device) < self.top_k, weights, 0.0)
        sums = weights.cumsum(-1)
        mass = sums[:, -1:] if total is None else torch.where(self.is_limited, sums[:, -1:], total)
        wanted = self.top_p * mass
        return (sums - weights < wanted) & (weights > 0), self.is_limited | (sums[:, -1:] >= wanted)


def _order(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates in descending order, equal ones by token."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: there is one zero
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32  # integers in the order of the floats
    order = (keys | (0x7FFFFFFF - indices)).argsort(dim=-1, descending=True)
    return values.gather(-1, order), indices.gather(-1, order)


def _sort(logits: Tensor) -> Tensor:
    """Descending. (numpy's is ten times as fast as torch's on a CPU.)"""
    if logits.device.type == "cpu":
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(dim=-1, descending=True).values


def _keep(weights: Tensor, rows: Sequence[History]) -> Tensor:
    """Weights, the best one's being 1, without those below min_p."""
    min_p = [row.sampling.min_p for row in rows]
    return weights if not any(min_p) else torch.where(weights >= _column(min_p, weights.device), weights, 0.0)


def _invert(weights: Tensor, rows: Sequence[History]) -> Tensor:
    """weights [N, K] → [N]: the first place at which their sum passes a random share of the whole."""
    noise = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=weights.device)
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:]
    target = noise[:, None] * whole
    below = torch.nextafter(whole, torch.zeros_like(whole))  # a weight of 0 is never chosen, however rounded
    places = torch.searchsorted(sums, torch.minimum(target, below), right=True)[:, 0]
    return places.clamp_(max=weights.shape[-1] - 1)  # past the end where nothing has any weight


def _parts(indices: list[int], logits: Tensor) -> Iterator[list[int]]:
    size = max(1, PART // logits.shape[-1]) if logits.device.type == "cpu" else len(indices)
    for start in range(0, len(indices), size or 1):
        yield indices[start : start + size]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
