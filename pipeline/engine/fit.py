"""The largest batch that fits a GPU, for each length of sequences: for `plan`. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.memory import RESERVE_BYTES, Design, Part, pick_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The most sequences of `length` tokens that fit the GPU at once; 0: not even one."""

    length: int
    batch: int


def fit_batches(design: Design, limits: BuildLimits, *, gpu_bytes: int) -> tuple[Fit, ...]:
    """The largest batch for each length from 1K doubling up to max_seq_len, if the engine were built for just that.

    Keeps the limits' rows per context step; a context step holds no more sequences than the limits allow it.
    """
    part = pick_part(design, limits)
    return tuple(
        Fit(length=length, batch=_find_largest(_Needs(part=part, limits=limits, length=length).nbytes, gpu_bytes))
        for length in _lengths(limits.max_seq_len)
    )


@dataclass(slots=True, kw_only=True)
class _Needs:
    """Bytes for an engine of one rectangle, as a function of its batch."""

    part: Part
    limits: BuildLimits
    length: int
    # sequences and rows of a context step -> its workspace
    contexts: dict[tuple[int, int], int] = field(default_factory=dict)

    def nbytes(self, batch: int) -> int:
        limits = replace(
            self.limits,
            max_seq_len=self.length,
            max_batch_size=batch,
            max_num_tokens=max(batch, self.limits.max_num_tokens),  # a step holds a token of each
            generation=(Rectangle(batch=batch, length=self.length),),
            max_blocks=batch * -(-self.length // self.limits.block_size) + 1,
        )
        context, generation = limits.profiles()
        sequences = min(batch, self.limits.context_batch)
        key = (sequences, limits.max_num_tokens)
        if key not in self.contexts:
            context = replace(context, maximum={**context.maximum, "B": sequences, "N": sequences})
            self.contexts[key] = self.part.plan(context).nbytes
        workspace = max(self.part.plan(generation).nbytes, self.contexts[key])
        pool = limits.max_blocks * limits.block_size * self.part.kv_bytes_per_token
        return self.part.weights + workspace + pool + self.part.io_bytes(generation) + RESERVE_BYTES


def _find_largest(needs: Callable[[int], int], available: int) -> int:
    """The largest batch whose needs fit, 0 if none does. Needs grow about linearly: false position, a few steps."""
    low, low_needs, high, slope = 0, 0, 0, 0.0
    while not high or high - low > 1:
        guess = low + max(1, int((available - low_needs) / slope)) if slope else low + 1
        if high:
            guess = min(guess, high - 1)
        bytes_needed = needs(guess)
        slope = (bytes_needed - low_needs) / (guess - low) if low else 0.0
        if bytes_needed <= available:
            low, low_needs = guess, bytes_needed
        else:
            high = guess
    return low


def _lengths(longest: int) -> list[int]:
    lengths = []
    length = 1024
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]
