"""Which tokens go into which step: prompts in chunks mixed with single tokens, or windows of text in batches.

Block tables are scrambled by a seeded permutation, so that nothing passes by physical order; every row's logits are
asked for, in packed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.runtime.steps import Chunk, plan_step

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens and where they stand: `offset` moves RoPE positions (not cache slots) past the start of a context, which
    shows a scaled RoPE far out without the cost of a long sequence."""

    tokens: tuple[int, ...]
    offset: int = 0
    prefill: int | None = None  # tokens that count as the prompt; the rest are fed one at a time. None: all of them

    @property
    def positions(self) -> range:
        return range(self.offset, self.offset + len(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [start, end) of sequence `sequence`, and the packed rows [end - start] that they take in the step."""

    sequence: int
    start: int
    end: int
    rows: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokens:
    """Of N positions, int64 [N] each: the packed row, the token that follows, the sequence, the place within it."""

    rows: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its pieces, and the network's inputs as int32 tensors."""

    pieces: tuple[Piece, ...]
    inputs: dict[str, torch.Tensor]

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> NextTokens:
        """The positions whose next token the sequence holds."""
        import torch

        rows: list[int] = []
        columns: list[tuple[int, int, int]] = []
        for piece in self.pieces:
            tokens = sequences[piece.sequence].tokens
            known = min(piece.end, len(tokens) - 1) - piece.start
            rows += piece.rows[: max(known, 0)].tolist()
            columns += [
                (tokens[place + 1], piece.sequence, place) for place in range(piece.start, piece.start + max(known, 0))
            ]
        targets, owners, places = torch.tensor(columns, dtype=torch.int64).reshape(-1, 3).T.contiguous()
        return NextTokens(rows=torch.tensor(rows, dtype=torch.int64), targets=targets, owners=owners, places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    sequences: tuple[TokenSequence, ...]
    steps: tuple[Step, ...]
    num_blocks: int


def make_sequences(
    prompts: Sequence[Sequence[int]], *, decode_tokens: int, architecture: Architecture, max_seq_len: int
) -> list[TokenSequence]:
    """Each prompt followed by `decode_tokens` forced tokens (its own, over again), cut to what the engine can hold. The
    first one is also taken past the original context, where RoPE scaling states one that max_seq_len exceeds."""
    sequences = []
    for prompt in prompts:
        kept = tuple(prompt)[: max_seq_len - decode_tokens]
        forced = tuple(kept[i % len(kept)] for i in range(decode_tokens))
        sequences.append(TokenSequence(tokens=kept + forced, prefill=len(kept)))
    original = int(architecture.rope.get("original_max_position_embeddings", 0))
    first = sequences[0]
    if original and original + len(first.tokens) <= max_seq_len:
        sequences.append(TokenSequence(tokens=first.tokens, prefill=first.prefill, offset=original))
    return sequences


def schedule_prompts(
    sequences: Sequence[TokenSequence], *, prefill_chunk: int, block_size: int, seed: int = 0
) -> Schedule:
    """Sequence i joins at step i, is prefilled in chunks and then decoded token by token, so that most steps mix both
    and batches are of unequal lengths."""
    tables, num_blocks = _scramble([len(s.tokens) for s in sequences], block_size, seed)
    position = [0] * len(sequences)
    steps: list[Step] = []
    while any(at < len(s.tokens) for at, s in zip(position, sequences, strict=True)):
        spans = []
        for i, sequence in enumerate(sequences[: len(steps) + 1]):
            start, length = position[i], len(sequence.tokens)
            if start >= length:
                continue
            prompt = length if sequence.prefill is None else sequence.prefill
            end = min(start + prefill_chunk, prompt) if start < prompt else start + 1
            spans.append((i, start, end))
            position[i] = end
        steps.append(_plan(spans, sequences, tables, block_size, num_blocks))
    return Schedule(sequences=tuple(sequences), steps=tuple(steps), num_blocks=num_blocks)


def schedule_windows(
    sequences: Sequence[TokenSequence], *, batch: int, block_size: int, chunk: int | None = None, seed: int = 0
) -> Schedule:
    """`batch` whole sequences at once, each in steps of at most `chunk` tokens (None: in one). Blocks are used again
    group after group: all that is read was just written."""
    groups = [list(range(i, min(i + batch, len(sequences)))) for i in range(0, len(sequences), batch)]
    longest = max(len(s.tokens) for s in sequences)
    size = chunk or longest
    slots, num_blocks = _scramble([longest] * min(batch, len(sequences)), block_size, seed)
    steps = []
    for group in groups:
        tables = {i: slots[place] for place, i in enumerate(group)}
        for start in range(0, max(len(sequences[i].tokens) for i in group), size):
            ends = {i: min(start + size, len(sequences[i].tokens)) for i in group}
            spans = [(i, start, end) for i, end in ends.items() if end > start]
            steps.append(_plan(spans, sequences, tables, block_size, num_blocks))
    return Schedule(sequences=tuple(sequences), steps=tuple(steps), num_blocks=num_blocks)


def _scramble(lengths: Sequence[int], block_size: int, seed: int) -> tuple[dict[int, list[int]], int]:
    """A block table per sequence over shuffled blocks, and how many blocks there are; block 0 stays reserved."""
    counts = [-(-length // block_size) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts)) + 1
    ends = np.cumsum(counts)
    tables = {i: order[end - count : end].tolist() for i, (end, count) in enumerate(zip(ends, counts, strict=True))}
    return tables, sum(counts) + 1


def _plan(
    spans: Sequence[tuple[int, int, int]],
    sequences: Sequence[TokenSequence],
    tables: dict[int, list[int]],
    block_size: int,
    num_blocks: int,
) -> Step:
    import torch

    chunks = []
    for i, start, end in spans:
        table = tables[i][: -(-end // block_size)]
        chunks.append(Chunk(tokens=sequences[i].tokens[start:end], start=start, block_table=table, logits="all"))
    planned = plan_step(chunks, block_size=block_size, num_blocks=num_blocks).inputs
    pieces = []
    for place, (i, start, end) in enumerate(spans):
        rows = planned["pad_index"][place, : end - start]
        planned["position_ids"][rows] += sequences[i].offset
        pieces.append(Piece(sequence=i, start=start, end=end, rows=rows))
    planned["logit_rows"] = np.arange(len(planned["input_ids"]), dtype=np.int32)  # packed order, like hidden states
    return Step(pieces=tuple(pieces), inputs={name: torch.from_numpy(value) for name, value in planned.items()})
