"""Merged news of a sequence as the tensors of a response."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.runtime.request import FinishReason
from pipeline.triton.backend.requests import Wanted
from pipeline.triton.backend.responses import Pending, build_arrays
from tests.triton.backend.updates import VOCABULARY, Running

NOTHING = Wanted(perf_metrics=False, num_input_tokens=False, num_output_tokens=False)
EVERYTHING = Wanted(perf_metrics=True, num_input_tokens=True, num_output_tokens=True)


def test_several_steps_are_merged_and_taken_once() -> None:
    running, pending = Running(return_log_probs=True), Pending()
    assert not pending.has_news
    for update in (running.step(1), running.step(2, 3)):
        pending.add(update)
    taken = pending.take()
    assert (taken.tokens, taken.log_probs, taken.finished, taken.sent) == ([1, 2, 3], [-0.125, -0.25, -0.375], False, 0)
    assert not pending.has_news
    pending.add(running.end(4))
    taken = pending.take()
    assert (taken.tokens, taken.log_probs, taken.finished, taken.sent) == ([4], [-0.5], True, 3)
    assert not pending.has_news


def test_an_end_without_a_token_is_news() -> None:
    pending = Pending()
    pending.add(Running().end(reason=FinishReason.END_ID))
    assert pending.has_news
    assert pending.take().finished


@pytest.mark.parametrize(
    ("streaming", "exclude", "ids"), [(True, False, [1, 2]), (False, True, [1, 2]), (False, False, [7, 8, 9, 1, 2])]
)
def test_the_prompt_comes_first_where_an_answer_is_whole(streaming: bool, exclude: bool, ids: list[int]) -> None:
    running, pending = Running(streaming=streaming, exclude_input_in_output=exclude), Pending()
    pending.add(running.end(1, 2))
    arrays = build_arrays(running.handle, pending.take(), row=3, sequence=0, wanted=NOTHING)
    assert {name: (array.tolist(), array.dtype) for name, array in arrays.items()} == {
        "output_ids": ([[ids]], np.int32),
        "sequence_length": ([[len(ids)]], np.int32),
        "batch_index": ([[3]], np.int32),
        "sequence_index": ([[0]], np.int32),
    }


def test_log_probs_and_logits_belong_to_the_tokens_that_are_sent() -> None:
    """Though the executor is further already."""
    running = Running(return_log_probs=True, return_generation_logits=True, return_context_logits=True)
    running.result.context_logits = torch.ones(3, VOCABULARY)
    pending, responses = Pending(), []
    pending.add(running.step(1, 2))
    taken = [pending.take()]
    pending.add(running.step(3))
    pending.add(running.step(4))
    taken.append(pending.take())
    running.step(5)
    responses = [build_arrays(running.handle, each, row=0, sequence=0, wanted=NOTHING) for each in taken]
    for response, tokens, total in zip(responses, ([1, 2], [3, 4]), (3, 10), strict=True):
        assert response["output_ids"].tolist() == [[tokens]]
        assert response["output_log_probs"].tolist() == [[[-token / 8 for token in tokens]]]
        assert response["cum_log_probs"].tolist() == [[-total / 8]]
        assert response["generation_logits"].tolist() == [[[[token] * VOCABULARY for token in tokens]]]
    assert responses[0]["context_logits"].shape == (1, 3, VOCABULARY)
    assert "context_logits" not in responses[1]


def test_what_is_told_once_comes_with_the_end() -> None:
    running, pending = Running(sequences=2), Pending()
    pending.add(running.step(1, sequence=1))
    before = build_arrays(running.handle, pending.take(), row=0, sequence=1, wanted=EVERYTHING)
    pending.add(running.end(2, sequence=1))
    last = build_arrays(running.handle, pending.take(), row=0, sequence=1, wanted=EVERYTHING)
    assert set(before) == {"output_ids", "sequence_length", "batch_index", "sequence_index"}
    assert last["sequence_index"].tolist() == [[1]]
    told = {name: array.item() for name, array in last.items() if name not in before}
    assert told == {
        "num_input_tokens": 3,
        "num_output_tokens": 2,
        "kv_cache_alloc_new_blocks": 3,
        "kv_cache_reused_blocks": 2,
        "kv_cache_alloc_total_blocks": 5,
        "total_accepted_draft_tokens": 0,
        "total_draft_tokens": 0,
        "acceptance_rate": 0.0,
        "arrival_time_ns": 10**9,
        "first_scheduled_time_ns": 2 * 10**9,
        "first_token_time_ns": 3 * 10**9,
        "last_token_time_ns": 4 * 10**9,
    }
