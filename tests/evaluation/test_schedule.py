"""Schedules: every token once, in order; staggered prompts; scrambled, disjoint block tables."""

import numpy as np
import torch

from pipeline.evaluation.schedule import Schedule, TokenSequence, schedule_prompts, schedule_windows

SEQUENCES = [
    TokenSequence(tokens=tuple(range(100, 117)), prefill=12),
    TokenSequence(tokens=tuple(range(200, 205)), prefill=3, offset=64),
    TokenSequence(tokens=tuple(range(300, 309))),
]


def fed(schedule: Schedule) -> dict[int, list[tuple[int, int, int]]]:
    """(token, position, slot) of each sequence in the order fed."""
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for step in schedule.steps:
        ids, positions, slots = (step.inputs[n].tolist() for n in ("input_ids", "position_ids", "slot_ids"))
        for piece in step.pieces:
            rows.setdefault(piece.sequence, []).extend((ids[r], positions[r], slots[r]) for r in piece.rows)
    return rows


def test_every_token_is_fed_once_in_order_at_its_position_and_slot() -> None:
    rows = fed(schedule_prompts(SEQUENCES, prefill_chunk=5, block_size=4))
    for i, sequence in enumerate(SEQUENCES):
        expected = [(t, sequence.offset + p, p) for p, t in enumerate(sequence.tokens)]
        assert rows[i] == expected


def test_prompts_are_chunked_then_decoded_one_by_one() -> None:
    schedule = schedule_prompts(SEQUENCES, prefill_chunk=5, block_size=4)
    sizes = [p.end - p.start for step in schedule.steps for p in step.pieces if p.sequence == 0]
    assert sizes == [5, 5, 2, 1, 1, 1, 1, 1]


def test_blocks_are_disjoint_scrambled_and_never_the_reserved_one() -> None:
    schedule = schedule_prompts(SEQUENCES, prefill_chunk=5, block_size=4)
    used: dict[int, set[int]] = {}
    for step in schedule.steps:
        for place, piece in enumerate(step.pieces):
            table = step.inputs["block_tables"][place].tolist()
            used.setdefault(piece.sequence, set()).update(b for b in table if b != 0)
    blocks = [b for table in used.values() for b in table]
    assert len(blocks) == len(set(blocks)) == schedule.num_blocks - 1
    first = schedule.steps[3].inputs["block_tables"][0].tolist()
    assert first != sorted(first)


def test_windows_reuse_the_same_blocks_and_score_all_but_the_last_token() -> None:
    windows = [TokenSequence(tokens=tuple(range(k, k + 8))) for k in (10, 30, 50)]
    schedule = schedule_windows(windows, batch=2, block_size=4)
    assert [len(step.pieces) for step in schedule.steps] == [2, 1]
    assert schedule.num_blocks == 2 * 2 + 1
    for step in schedule.steps:
        following = step.next_tokens(schedule.sequences)
        assert len(following.targets) == 7 * len(step.pieces)
        assert torch.equal(following.targets, step.inputs["input_ids"].long()[following.rows] + 1)
        assert following.places.tolist() == [*range(7)] * len(step.pieces)
        assert following.owners.unique().tolist() == [piece.sequence for piece in step.pieces]
        assert step.inputs["logit_rows"].tolist() == np.arange(8 * len(step.pieces)).tolist()


def test_long_windows_come_in_chunks_over_the_same_blocks() -> None:
    windows = [TokenSequence(tokens=tuple(range(k, k + n))) for k, n in ((10, 11), (50, 5))]
    schedule = schedule_windows(windows, batch=2, block_size=4, chunk=4)
    assert [[p.end - p.start for p in step.pieces] for step in schedule.steps] == [[4, 4], [4, 1], [3]]
    for i, window in enumerate(windows):
        assert fed(schedule)[i] == [(t, p, p) for p, t in enumerate(window.tokens)]
    scored = [step.next_tokens(windows) for step in schedule.steps]
    assert sum(len(each.targets) for each in scored) == 10 + 4
