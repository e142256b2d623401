"""Plans one step: from chunks of sequences to the network's inputs (`network/inputs.py` says what each means).

Vectorised over tokens and blocks: this runs between any two steps of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Inputs = dict[str, npt.NDArray[np.int32]]
LOGITS = ("none", "last", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next tokens of one sequence.

    tokens: at least one. start: the first one's place in the sequence. block_table: the sequence's blocks in order, at
    least as many as hold everything up to the chunk's end. logits: of which rows, "none", "last" or "all".
    """

    tokens: Sequence[int] | npt.NDArray[np.integer[Any]]
    start: int
    block_table: Sequence[int] | npt.NDArray[np.integer[Any]]
    logits: str = "last"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """inputs: the step's int32 arrays by name. logit_owner: [n, 2], the chunk and the position within the sequence that
    each row of the logits belongs to. Where no chunk wants any, one row is computed all the same (an engine's sizes
    start at 1) and has no owner."""

    inputs: Inputs
    logit_owner: npt.NDArray[np.int32]


def plan_step(chunks: Sequence[Chunk], *, block_size: int, num_blocks: int) -> StepPlan:
    """The inputs of a step over `chunks`. Raises ValueError, naming the chunk, for an empty chunk, a table too short,
    a block outside [1, num_blocks) (block 0 is padding), or two rows for one place in the cache."""
    lengths, starts = _check(chunks, block_size)
    tables = _pad_tables(chunks, -(-(starts + lengths) // block_size), num_blocks)
    firsts = np.cumsum(lengths) - lengths
    chunk_of = np.repeat(np.arange(len(chunks)), lengths)
    within = np.arange(len(chunk_of)) - firsts[chunk_of]
    slots = starts[chunk_of] + within
    blocks = tables[chunk_of, slots // block_size]
    place = blocks * block_size + slots % block_size

    order = np.argsort(place, kind="stable")
    _check_writes(place[order], chunk_of[order], block_size)
    row_of = np.empty_like(order)
    row_of[order] = np.arange(len(order))
    lengths_before = np.concatenate([[0], np.cumsum(np.bincount(blocks, minlength=num_blocks))])
    first_row = np.minimum(lengths_before[:-1], len(order) - 1)
    written = lengths_before[1:] > lengths_before[:-1]

    longest = int(lengths.max())
    query = np.minimum(np.arange(longest)[None, :], lengths[:, None] - 1)  # padding repeats the last row
    wanted = _wanted(chunks, chunk_of, within, lengths)
    logit_rows = row_of[wanted] if len(wanted) else np.zeros(1, np.int64)
    inputs = {
        "input_ids": np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks])[order],
        "position_ids": slots[order],
        "slot_ids": slots[order],
        "update_lengths": lengths_before,
        "write_indices": np.where(written, place[order][first_row] % block_size, 0),
        "block_tables": tables,
        "pad_index": row_of[firsts[:, None] + query],
        "unpad_index": (chunk_of * longest + within)[order],
        "logit_rows": logit_rows,
    }
    return StepPlan(
        {name: np.ascontiguousarray(value, np.int32) for name, value in inputs.items()},
        np.stack([chunk_of[wanted], slots[wanted]], axis=1).astype(np.int32),
    )


def _check(chunks: Sequence[Chunk], block_size: int) -> tuple[Integers, Integers]:
    if not chunks:
        raise ValueError("a step needs at least one chunk")
    for index, chunk in enumerate(chunks):
        end = chunk.start + len(chunk.tokens)
        if not len(chunk.tokens) or chunk.start < 0:
            raise ValueError(f"chunk {index} holds {len(chunk.tokens)} tokens from position {chunk.start}")
        if chunk.logits not in LOGITS:
            raise ValueError(f"chunk {index} wants logits {chunk.logits!r}, not one of {', '.join(LOGITS)}")
        if len(chunk.block_table) * block_size < end:
            raise ValueError(
                f"chunk {index} ends at {end}, its {len(chunk.block_table)} blocks hold {block_size} rows each"
            )
    lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
    return lengths, np.array([chunk.start for chunk in chunks], np.int64)


def _pad_tables(chunks: Sequence[Chunk], used: Integers, num_blocks: int) -> Integers:
    """[B, MB], only as wide as this step reads, padded with block 0."""
    tables = np.zeros((len(chunks), int(used.max())), np.int64)
    for row, chunk, columns in zip(tables, chunks, used, strict=True):
        row[:columns] = chunk.block_table[:columns]
    real = np.arange(tables.shape[1])[None, :] < used[:, None]
    wrong = np.argwhere(real & ((tables < 1) | (tables >= num_blocks)))
    if len(wrong):
        index, column = wrong[0]
        raise ValueError(f"chunk {index} has block {tables[index, column]} in its table, not one of [1, {num_blocks})")
    return tables


def _check_writes(places: Integers, chunk_of: Integers, block_size: int) -> None:
    """Each block's new rows must follow one another: the cache takes a first offset and a count."""
    same_block = places[1:] // block_size == places[:-1] // block_size
    wrong = np.flatnonzero(same_block & (places[1:] != places[:-1] + 1))
    if len(wrong):
        at = wrong[0]
        raise ValueError(
            f"chunks {chunk_of[at]} and {chunk_of[at + 1]} write to block {places[at] // block_size} at offsets "
            f"{places[at] % block_size} and {places[at + 1] % block_size}: a block takes one run of rows per step"
        )


def _wanted(chunks: Sequence[Chunk], chunk_of: Integers, within: Integers, lengths: Integers) -> Integers:
    """Which tokens' logits are asked for, as indices into the chunks laid end to end."""
    kind = np.array([LOGITS.index(chunk.logits) for chunk in chunks])[chunk_of]
    last = within == lengths[chunk_of] - 1
    return np.flatnonzero((kind == LOGITS.index("all")) | ((kind == LOGITS.index("last")) & last))
