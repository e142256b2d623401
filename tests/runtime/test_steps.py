"""The vectorised planner against a loop over tokens that follows the declaration of the inputs word by word."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.network.inputs import STEP_INPUTS
from pipeline.runtime.steps import Chunk, StepPlan, plan_step


def plan_by_loop(chunks: list[Chunk], block_size: int, num_blocks: int) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    rows = []  # (block, offset, chunk, position, token)
    for c, chunk in enumerate(chunks):
        for i, token in enumerate(chunk.tokens):
            position = chunk.start + i
            rows.append((chunk.block_table[position // block_size], position % block_size, c, position, token))
    rows.sort()
    row_of = {(c, position): r for r, (_, _, c, position, _) in enumerate(rows)}
    new: dict[int, list[int]] = defaultdict(list)
    for block, offset, *_ in rows:
        new[block].append(offset)
    longest = max(len(chunk.tokens) for chunk in chunks)
    columns = max((chunk.start + len(chunk.tokens) - 1) // block_size + 1 for chunk in chunks)
    update_lengths = [0]
    for block in range(num_blocks):
        update_lengths.append(update_lengths[-1] + len(new[block]))
    tables, pad_index, owner = [], [], []
    for c, chunk in enumerate(chunks):
        length = len(chunk.tokens)
        used = (chunk.start + length - 1) // block_size + 1
        tables.append(list(chunk.block_table[:used]) + [0] * (columns - used))
        pad_index.append([row_of[c, chunk.start + min(i, length - 1)] for i in range(longest)])
        wanted = {"none": [], "last": [length - 1], "all": range(length)}[chunk.logits]
        owner += [(c, chunk.start + i) for i in wanted]
    inputs = {
        "input_ids": [token for *_, token in rows],
        "position_ids": [position for *_, position, _ in rows],
        "slot_ids": [position for *_, position, _ in rows],
        "update_lengths": update_lengths,
        "write_indices": [new[block][0] if new[block] else 0 for block in range(num_blocks)],
        "block_tables": tables,
        "pad_index": pad_index,
        "unpad_index": [c * longest + position - chunks[c].start for _, _, c, position, _ in rows],
        "logit_rows": [row_of[key] for key in owner] or [0],
    }
    return inputs, owner


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Chunk], int, int]:
    """Random chunks over a shuffled pool; sequences may share the full blocks of a common prefix."""
    block_size = draw(st.integers(1, 5))
    spans = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=5))
    counts = [-(-(start + length) // block_size) for start, length in spans]
    spare = draw(st.integers(0, 3))
    pool = draw(st.permutations(range(1, sum(counts) + spare + 1)))
    chunks, at = [], 0
    for (start, length), count in zip(spans, counts, strict=True):
        table = list(pool[at : at + count])
        if chunks and draw(st.booleans()):  # a shared prefix is read by both and written by neither
            shared = min(start, chunks[-1].start) // block_size
            table[:shared] = chunks[-1].block_table[:shared]
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        chunks.append(
            Chunk(tokens=tokens, start=start, block_table=table, logits=draw(st.sampled_from(["none", "last", "all"])))
        )
        at += count
    return chunks, block_size, sum(counts) + spare + 1


@given(steps())
@settings(max_examples=300, deadline=None)
def test_the_plan_is_that_of_the_loop(step: tuple[list[Chunk], int, int]) -> None:
    chunks, block_size, num_blocks = step
    plan = plan_step(chunks, block_size=block_size, num_blocks=num_blocks)
    inputs, owner = plan_by_loop(chunks, block_size, num_blocks)
    assert plan.inputs.keys() == inputs.keys()
    for name, expected in inputs.items():
        np.testing.assert_array_equal(plan.inputs[name], expected, err_msg=name)
    assert plan.logit_owner.tolist() == [list(pair) for pair in owner]


@given(steps())
@settings(max_examples=100, deadline=None)
def test_shapes_and_types_are_the_declared_ones(step: tuple[list[Chunk], int, int]) -> None:
    chunks, block_size, num_blocks = step
    plan = plan_step(chunks, block_size=block_size, num_blocks=num_blocks)
    batch, columns = plan.inputs["block_tables"].shape
    sizes = {
        "T": sum(len(chunk.tokens) for chunk in chunks),
        "B": batch,
        "Q": max(len(chunk.tokens) for chunk in chunks),
        "MB": columns,
        "NB": num_blocks,
        "N": max(len(plan.logit_owner), 1),
    }
    assert [port.name for port in STEP_INPUTS] == list(plan.inputs)
    for port in STEP_INPUTS:
        assert plan.inputs[port.name].shape == port.resolve(sizes)
        assert plan.inputs[port.name].dtype == np.dtype(port.dtype)


def _plan(*chunks: Chunk, num_blocks: int = 8) -> StepPlan:
    return plan_step(chunks, block_size=4, num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([Chunk(tokens=[], start=0, block_table=[1])], "chunk 0 holds 0 tokens"),
        ([Chunk(tokens=[5], start=-1, block_table=[1])], "from position -1"),
        ([Chunk(tokens=[5], start=4, block_table=[1])], "ends at 5, its 1 blocks hold 4 rows"),
        ([Chunk(tokens=[5], start=0, block_table=[0])], r"block 0 in its table, not one of \[1, 8\)"),
        ([Chunk(tokens=[5], start=4, block_table=[2, 8])], "block 8 in its table"),
        ([Chunk(tokens=[5], start=0, block_table=[1], logits="first")], "wants logits 'first'"),
        (
            [Chunk(tokens=[5, 6], start=0, block_table=[3]), Chunk(tokens=[7], start=1, block_table=[3])],
            "write to block 3 at offsets 1 and 1",
        ),
        (
            [Chunk(tokens=[5], start=0, block_table=[3]), Chunk(tokens=[7], start=2, block_table=[3])],
            "write to block 3 at offsets 0 and 2",
        ),
    ],
)
def test_wrong_arguments_are_named(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(*chunks)


def test_a_step_that_wants_no_logits_computes_one_row_that_nobody_owns() -> None:
    plan = _plan(Chunk(tokens=[5, 6], start=0, block_table=[1], logits="none"))
    assert plan.inputs["logit_rows"].tolist() == [0]
    assert plan.logit_owner.shape == (0, 2)
