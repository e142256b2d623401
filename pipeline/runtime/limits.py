"""How large a step may be: an engine's profiles, or what is sensible for the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.engine.limits import BuildLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Raises CompatibilityError where the numbers contradict each other.

    num_blocks: blocks of the pool, block 0 (padding) included. block_size: tokens of one.
    max_seq_len: prompt and answer together.
    max_batch_size: sequences in flight.
    max_num_tokens: rows of a context step, one that holds chunks of prompts (and single tokens beside them).
    max_chunk: rows of one sequence in it; None: as many as the step holds.
    context_batch: sequences in it; None: as many as are in flight.
    max_padded_rows: sequences times rows of the longest chunk in it, to which attention pads; None for no limit.
    mixed: whether single tokens ride in a context step too. Attention pads them to the longest chunk beside them; where
        the linears take no less time for more rows at once, as on a CPU, they had better take turns with the chunks.
    generation: (batch, length) rectangles, into one of which a step of single tokens must fit; (): any does.
    """

    num_blocks: int
    block_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_chunk: int | None = None
    context_batch: int | None = None
    max_padded_rows: int | None = None
    mixed: bool = True
    generation: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("block_size", "max_seq_len", "max_batch_size", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise CompatibilityError(f"{name} is {getattr(self, name)}", hint="give a positive number")
        for name in ("max_chunk", "context_batch", "max_padded_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise CompatibilityError(f"{name} is {value}", hint="give a positive number, or none for no limit")
        if self.generation and max(length for _, length in self.generation) < self.max_seq_len:
            raise CompatibilityError(f"no generation profile reaches max_seq_len {self.max_seq_len}")
        if self.num_blocks < 2:
            raise CompatibilityError(f"{self.num_blocks} blocks: block 0 is padding, so at least 2 are needed")

    @classmethod
    def of_engine(cls, build: BuildLimits, num_blocks: int | None = None) -> Limits:
        """The limits that an engine was built for; fewer blocks than it allows where memory is short."""
        return cls(
            num_blocks=min(num_blocks or build.max_blocks, build.max_blocks),
            block_size=build.block_size,
            max_seq_len=build.max_seq_len,
            max_batch_size=build.max_batch_size,
            max_num_tokens=min(build.max_num_tokens, build.context_batch * build.chunk),
            max_chunk=build.chunk,
            context_batch=build.context_batch,
            generation=tuple((rectangle.batch, rectangle.length) for rectangle in build.generation),
        )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def chunk_for(self, batch: int) -> int:
        """Rows of the longest chunk in a context step of so many sequences."""
        chunk = self.max_num_tokens if self.max_chunk is None else self.max_chunk
        return chunk if self.max_padded_rows is None else max(1, min(chunk, self.max_padded_rows // batch))

    @property
    def context_sequences(self) -> int:
        batch = self.max_batch_size if self.context_batch is None else min(self.context_batch, self.max_batch_size)
        return min(batch, self.max_num_tokens)

    def fit_generation(self, lengths: Sequence[int]) -> list[bool]:
        """Which sequences of these lengths, the most urgent first, one step of single tokens takes: those of the
        rectangle that takes most, among the rectangles that take the first."""
        rectangles = self.generation or ((self.max_batch_size, self.max_seq_len),)
        best: list[bool] = []
        for batch, longest in rectangles:
            if lengths[0] > longest:
                continue
            taken, room = [], batch
            for length in lengths:
                fits = room > 0 and length <= longest
                room -= fits
                taken.append(fits)
            if sum(taken) > sum(best):
                best = taken
        return best
