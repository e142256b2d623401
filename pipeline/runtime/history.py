"""What one sequence brings to the choice of its next token: the tokens so far, counted, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pipeline.runtime.noise import draw_uniforms
from pipeline.runtime.sampling import Sampling

AHEAD = 64  # random numbers made at a time: a call costs the same for one


class TokenCounts:
    """How often each token was seen: ids [n] and counts [n], in order of first sight."""

    def __init__(self, tokens: Iterable[int]) -> None:
        ids, first, counts = np.unique(np.fromiter(tokens, np.int64), return_index=True, return_counts=True)
        order = np.argsort(first)
        self._ids, self._counts = ids[order], counts[order].astype(np.float32)
        self._place = {int(token): place for place, token in enumerate(self._ids)}

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):  # doubled, so that a token costs the same however long the sequence
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + 16, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(len(self._counts) + 16, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._place)]


class History:
    """One sequence's side of the sampler. `tokens` is the sequence's own list, prompt and answer, which it appends to
    before it calls `add`."""

    def __init__(
        self, sampling: Sampling, tokens: list[int], *, prompt_length: int, seed: int, index: int = 0, end_id: int = -1
    ) -> None:
        self.sampling, self.tokens, self.prompt_length = sampling, tokens, prompt_length
        self.seed, self.index, self.end_id = seed, index, end_id
        self.counts = TokenCounts(tokens) if sampling.has_penalties else None
        self.top_p = sampling.top_p
        self._noise: list[float] = []
        self._noise_start = -1
        self._short_words = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._long_words = [(list(word[:-1]), word[-1]) for word in sampling.bad_words if len(word) > 1]

    def add(self, token: int) -> None:
        """Takes note of a token that was appended."""
        if self.counts is not None:
            self.counts.add(token)
        self._decay(token)

    @property
    def step(self) -> int:
        """How many tokens were generated: the place of the next draw."""
        return len(self.tokens) - self.prompt_length

    @property
    def uniform(self) -> float:
        """The random number of this step, within (0, 1)."""
        step = self.step
        start = step - step % AHEAD
        if start != self._noise_start:
            places = (np.full(AHEAD, self.seed, np.uint64), np.full(AHEAD, self.index), np.arange(start, start + AHEAD))
            self._noise = draw_uniforms(*(place.astype(np.uint64) for place in places)).tolist()
            self._noise_start = start
        return self._noise[step - start]

    @property
    def edits(self) -> bool:
        """Whether this row's logits are changed before anything is chosen."""
        sampling = self.sampling
        return (
            self.counts is not None
            or bool(sampling.bad_words)
            or sampling.embedding_bias is not None
            or (self.end_id >= 0 and self.step < sampling.min_tokens)
        )

    def excluded(self) -> list[int]:
        """Tokens that cannot come next."""
        tokens = list(self._short_words)
        for prefix, last in self._long_words:
            if self.tokens[-len(prefix) :] == prefix:
                tokens.append(last)
        if self.end_id >= 0 and self.step < self.sampling.min_tokens:
            tokens.append(self.end_id)
        return tokens

    def _decay(self, token: int) -> None:
        sampling = self.sampling
        if token == sampling.top_p_reset_id:
            self.top_p = sampling.top_p
        elif self.top_p > 0:
            self.top_p = max(self.top_p * sampling.top_p_decay, sampling.top_p_min)
