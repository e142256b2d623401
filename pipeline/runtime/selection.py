"""Which of the running sequences make the next step, and with how many tokens: one that fits the engine's profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.runtime.limits import Limits
from pipeline.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` tokens of a sequence, from `sequence.cached`."""

    sequence: Sequence
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token can be chosen after it."""
        return self.count == self.sequence.remaining


class Selector:
    """Single tokens and chunks of prompts together where one context step takes them all; else they take turns, but for
    a prompt of a higher class than all who generate. Nor does a prompt wait for chunks of lower classes beside it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._context_last = False

    def select(self, ranked: list[Sequence], level: Callable[[Sequence], int]) -> list[Work]:
        """`ranked`: the running sequences, at least one, the most urgent first. `level`: a sequence's class by now."""
        single = [sequence for sequence in ranked if sequence.remaining == 1]
        prompts = [sequence for sequence in ranked if sequence.remaining > 1]
        if not prompts:
            return self._select_single(single)
        together = self.limits.mixed and len(single) < self.limits.context_sequences
        first = level(prompts[0])
        prompts = [sequence for sequence in prompts if level(sequence) == first]
        if single and not together and self._context_last and first >= level(single[0]):
            self._context_last = False
            return self._select_single(single)
        self._context_last = True
        return self._select_chunks(single if together else [], prompts)

    def _select_single(self, single: list[Sequence]) -> list[Work]:
        """As many as a generation profile takes; who ran longest ago first."""
        single = sorted(single, key=lambda sequence: sequence.last_step)
        fits = self.limits.fit_generation([len(sequence.tokens) for sequence in single])
        return [Work(sequence, 1) for sequence, fit in zip(single, fits, strict=True) if fit]

    def _select_chunks(self, single: list[Sequence], prompts: list[Sequence]) -> list[Work]:
        """Chunks of as few prompts as fill the step: more sequences make shorter chunks where padding is limited."""
        budget = self.limits.max_num_tokens - len(single)
        best: list[Work] = []
        most = 0
        for batch in range(1, min(len(prompts), self.limits.context_sequences - len(single)) + 1):
            longest, left, work = self.limits.chunk_for(len(single) + batch), budget, []
            for sequence in prompts[:batch]:
                if count := min(sequence.remaining, longest, left):
                    work.append(Work(sequence, count))
                    left -= count
            if budget - left > most:
                best, most = work, budget - left
            if not left:
                break
        return [*(Work(sequence, 1) for sequence in single), *best]
