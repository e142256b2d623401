"""Chooses the next token of many sequences at once, on whatever device the logits are. `sampling.py` says what and why.

Shapes: N rows, V vocabulary, K candidates. Every operation works on each row by itself, so that a row's token does not
depend on its neighbours; equal logits are ordered by token, so that it does not depend on how they were found either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.runtime.history import History
from pipeline.runtime.noise import draw_uniforms

NO_TOKEN = -1
# Candidates looked at for a nucleus without top_k; where they do not reach top_p, all are sorted.
NUCLEUS_CANDIDATES = 256


def choose_tokens(logits: Tensor, rows: Sequence[History]) -> list[int]:
    """logits [N, V] float32, finite, which stay as they are → the next token of each row; NO_TOKEN where every token is
    excluded."""
    edited = edit_logits(logits, rows)
    best, tokens = edited.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawn:
        whole = len(drawn) == len(rows)
        places = torch.tensor(drawn, device=logits.device)
        chosen = _draw(edited if whole else edited[places], [rows[index] for index in drawn])
        tokens[places] = chosen
    if edited is not logits:
        tokens = torch.where(best == -torch.inf, NO_TOKEN, tokens)
    result: list[int] = tokens.tolist()
    return result


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


def _draw(logits: Tensor, rows: Sequence[History]) -> Tensor:
    """[N] tokens by the inverse of the cumulative distribution."""
    device = logits.device
    samplings = [row.sampling for row in rows]
    temperature = _column([s.temperature for s in samplings], device)
    # Weights relative to the best token's: they cannot overflow, however low the temperature.
    scores = ((logits - logits.amax(-1, keepdim=True)) / temperature).nan_to_num_(nan=-torch.inf)
    words = ((row.seed, row.index, row.step) for row in rows)
    noise = draw_uniforms(*(np.array(column, np.uint64) for column in zip(*words, strict=True)))
    uniforms = torch.from_numpy(noise).to(device)[:, None]
    min_p = _column([s.min_p for s in samplings], device)
    width = logits.shape[-1]
    narrow = [i for i, row in enumerate(rows) if 0 < row.sampling.top_k < width or 0 < row.top_p < 1]
    if not narrow:
        return _invert(_keep(scores.exp(), min_p), uniforms)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    places = torch.tensor(narrow, device=device)
    tokens[places] = _draw_narrow(scores[places], [rows[i] for i in narrow], min_p[places], uniforms[places])
    if len(narrow) < len(rows):
        inside = set(narrow)
        places = torch.tensor([i for i in range(len(rows)) if i not in inside], device=device)
        tokens[places] = _invert(_keep(scores[places].exp(), min_p[places]), uniforms[places])
    return tokens


def _draw_narrow(scores: Tensor, rows: Sequence[History], min_p: Tensor, uniforms: Tensor) -> Tensor:
    """Among each row's best tokens: sorted, cut after top_k, then after top_p."""
    device, width = scores.device, scores.shape[-1]
    limits = [min(row.sampling.top_k or width, width) for row in rows]
    top_k = torch.tensor(limits, device=device)[:, None]
    top_p = _column([row.top_p or 1.0 for row in rows], device).double()
    total = scores.exp().sum(-1, keepdim=True, dtype=torch.float64)
    wanted = max((limit for limit in limits if limit < width), default=0)
    count = min(max(wanted, NUCLEUS_CANDIDATES if width in limits else 0), width)
    while True:
        values, indices = _best(scores, count)
        weights = torch.where(torch.arange(count, device=device) < top_k, values.exp(), 0.0).double()
        reached = weights.cumsum(-1)
        mass = torch.where(top_k < width, reached[:, -1:], total)
        complete = (top_k <= count) | (reached[:, -1:] >= top_p * mass)
        if count == width or bool(complete.all()):
            break
        count = width
    kept = weights * (reached - weights < top_p * mass)
    return indices.gather(-1, _invert(_keep(kept, min_p.double()), uniforms)[:, None])[:, 0]


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores [N, count] and their tokens, in descending order; equal ones by token."""
    width = scores.shape[-1]
    if count == width:
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values, indices
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: there is one zero
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32  # as integers, in the order of the floats
    keys = order | torch.arange(width - 1, -1, -1, device=scores.device)
    indices = width - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


def _keep(weights: Tensor, min_p: Tensor) -> Tensor:
    """Weights, the best one's being 1, without those below min_p."""
    return torch.where(weights >= min_p, weights, 0.0)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """weights [N, K], uniforms [N, 1] → [N]: the first place at which the sum passes that share of the whole."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # a weight of 0 is never chosen, however rounded
    places = torch.searchsorted(sums, torch.minimum(uniforms * whole, below), right=True)[:, 0]
    return places.clamp_(max=weights.shape[-1] - 1)  # past the end where nothing has any weight


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
