"""Tensors of the `tensorrt_llm` model to requests of the executor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_repo
from pipeline.runtime.errors import RequestError
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.retention import Keep, TokenRange
from pipeline.triton.backend.request_tensors import IGNORED, KNOWN, REFUSED, REQUEST_FIELDS, SAMPLING_FIELDS
from pipeline.triton.backend.requests import read_requests, read_wanted
from pipeline.triton.model_config import parse_config

VOCABULARY = 10


def tensors(batch: int = 1, **values: Any) -> dict[str, np.ndarray]:
    made = {
        "input_ids": np.array([[5, 6, 7]] * batch, np.int32),
        "input_lengths": np.array([[3]] * batch, np.int32),
        "request_output_len": np.array([[4]] * batch, np.int32),
    }
    return {**made, **{name: np.asarray(value) for name, value in values.items()}}


def read(given: dict[str, np.ndarray], *, request_id: str = "", **parameters: Any) -> list[Request]:
    return read_requests(given, request_id=request_id, vocab_size=VOCABULARY, parameters=parameters)


def test_every_input_of_the_model_is_read_or_refused() -> None:
    text = (Path(model_repo.__path__[0]) / "tensorrt_llm" / "config.pbtxt").read_text()
    known = [*REQUEST_FIELDS, *SAMPLING_FIELDS, *KNOWN, *IGNORED, *REFUSED]
    assert sorted(known) == sorted(tensor.name for tensor in parse_config(text, "tensorrt_llm").input)


def test_all_that_is_served_arrives() -> None:
    given = tensors(
        input_lengths=[[2]],
        end_id=[[1]],
        pad_id=[[0]],
        stop_words_list=[[[3, 4, 9, 0], [2, 3, -1, -1]]],
        bad_words_list=[[[8, 7], [1, 2]]],
        embedding_bias=np.arange(VOCABULARY - 1, dtype=np.float32)[None],
        num_return_sequences=[[2]],
        beam_width=[[1]],
        temperature=np.float32([[0.5]]),
        runtime_top_k=[[5]],
        runtime_top_p=np.float32([[0.75]]),
        runtime_top_p_min=np.float32([[0.25]]),
        runtime_top_p_decay=np.float32([[0.5]]),
        runtime_top_p_reset_ids=[[3]],
        repetition_penalty=np.float32([[1.5]]),
        presence_penalty=np.float32([[0.5]]),
        frequency_penalty=np.float32([[-0.5]]),
        min_tokens=[[2]],
        seed=np.array([[2**64 - 1]], np.uint64),
        return_log_probs=[[True]],
        return_context_logits=[[True]],
        return_generation_logits=[[True]],
        exclude_input_in_output=[[True]],
        streaming=[[True]],
        len_penalty=np.float32([[1.0]]),
        return_perf_metrics=[[True]],
    )
    (request,) = read(given, request_id="a", priority_class="P0", timeout_ms="3000", cache_salt="us", min_p="0.125")
    assert (request.input_ids, request.max_tokens, request.end_id, request.pad_id) == ((5, 6), 4, 1, 0)
    assert request.stop_words == ((3, 4), (9,)) and request.num_return_sequences == 2
    assert request.return_log_probs and request.return_context_logits and request.return_generation_logits
    assert request.exclude_input_in_output and request.streaming
    assert (request.request_id, request.priority, request.timeout) == ("a", Priority.P0, 3.0)
    assert (request.cache_salt, request.queue_timeout, request.retention) == ("us", None, None)
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.seed, s.min_tokens) == (0.5, 5, 0.75, 2**64 - 1, 2)
    assert (s.top_p_min, s.top_p_decay, s.top_p_reset_id, s.min_p) == (0.25, 0.5, 3, 0.125)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.5, 0.5, -0.5)
    assert s.bad_words == ((8,), (7,)) and s.embedding_bias is not None
    assert s.embedding_bias.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]  # a column that the tokenizer does not know
    wanted = read_wanted(given)
    assert wanted.perf_metrics and not wanted.num_input_tokens


def test_each_row_of_a_batch_is_a_request() -> None:
    first, second = read(
        tensors(
            2,
            input_lengths=[[3], [1]],
            seed=[[1], [2]],
            retention_token_range_starts=[[0], [0]],
            retention_token_range_ends=[[-1], [2]],
            retention_token_range_priorities=[[80], [10]],
        ),
        request_id="a",
    )
    assert (first.input_ids, second.input_ids) == ((5, 6, 7), (5,))
    assert (first.sampling.seed, second.sampling.seed) == (1, 2)
    assert (first.request_id, second.request_id) == ("a#0", "a#1")
    assert first.retention is not None and first.retention.ranges == (TokenRange(0, None, Keep(80)),)
    assert second.retention is not None and second.retention.ranges == (TokenRange(0, 2, Keep(10)),)


def test_retention_of_ranges_and_of_the_answer() -> None:
    (request,) = read(
        tensors(
            retention_token_range_starts=[[0, 64]],
            retention_token_range_ends=[[64, -1]],
            retention_token_range_priorities=[[90, 20]],
            retention_token_range_durations_ms=[[1500, -1]],
            retention_decode_priority=[[5]],
            retention_decode_duration_ms=[[250]],
        )
    )
    assert request.retention is not None
    assert request.retention.ranges == (TokenRange(0, 64, Keep(90, 1.5)), TokenRange(64, None, Keep(20)))
    assert request.retention.answer == Keep(5, 0.25)


def test_the_answer_may_be_retained_alone() -> None:
    (request,) = read(tensors(retention_decode_priority=[[5]]))
    assert request.retention is not None
    assert (request.retention.ranges, request.retention.answer) == ((), Keep(5))


def test_empty_lists_stand_for_nothing() -> None:
    empty = np.array([[[0], [-1]]], np.int32)
    none = np.zeros((1, 0), np.int32)
    (request,) = read(
        tensors(
            stop_words_list=empty,
            bad_words_list=np.zeros((1, 2, 0)),
            embedding_bias=np.zeros((1, 0)),
            retention_token_range_starts=none,
            lora_task_id=none,
        )
    )
    assert request.stop_words == () == request.sampling.bad_words and request.sampling.embedding_bias is None
    assert request.retention is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lora_task_id": [[1]]}, "lora_task_id is for LoRA, which is not served"),
        ({"draft_input_ids": [[1]]}, "draft_input_ids is for speculative"),
        ({"guided_decoding_guide": [[b"{}"]]}, "guided_decoding_guide is for guided"),
        ({"top_k": [[1]]}, "top_k is not an input"),
        ({"beam_width": [[4]]}, "beam_width is 4"),
        ({"temperature": [0.5, 0.5]}, "temperature has the shape"),
        ({"input_ids": [[1], [2]]}, "input_ids has the shape"),
        ({"input_lengths": [[4]]}, "input_lengths is 4, and input_ids has 3"),
        ({"input_lengths": [[0]]}, "input_lengths is 0"),
        ({"stop_words_list": [[[1, 2, 3]]]}, "stop_words_list has the shape"),
        ({"stop_words_list": [[[1, 2], [2, 1]]]}, "stop_words_list ends its words"),
        ({"bad_words_list": [[[1, 2], [3, -1]]]}, "bad_words_list ends its words"),
        ({"runtime_top_p": [[1.5]]}, "runtime_top_p is 1.5"),
        ({"retention_decode_priority": [[101]]}, "retention_decode_priority hold 101"),
        ({"retention_decode_duration_ms": [[-2]]}, "retention_decode_duration_ms hold -2 ms"),
        ({"retention_token_range_starts": [[0]]}, "retention_token_range_ends holds 0 values, and .*starts 1"),
        ({"retention_token_range_priorities": [[1, 2]]}, "retention_token_range_priorities holds 2 values"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read(tensors(**values))


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("temprature", "temprature is neither a parameter nor an input of tensorrt_llm", "did you mean temperature?"),
        ("timeout", "", ""),  # Triton's own
        ("triton_enable_empty_final_response", "", ""),
        ("return_output_ids", "", ""),  # as it always does
        ("temperature", "temperature is an input of tensorrt_llm, and came as a parameter", "send it as a tensor"),
        ("what", "what is neither", "parameters: cache_salt, min_p, .*; inputs: bad_words_list, beam_width, "),
    ],
)
def test_parameters_that_nobody_knows_are_refused(name: str, problem: str, hint: str) -> None:
    if not problem:
        assert read(tensors(), **{name: 1}) == read(tensors())
        return
    with pytest.raises(RequestError, match=problem) as caught:
        read(tensors(), min_p=0.1, **{name: 1})
    assert re.match(hint, caught.value.hint or "")


@pytest.mark.parametrize("name", ["timeout_ms", "queue_timeout_ms", "min_p"])
@pytest.mark.parametrize("value", [True, False, -5, "-5", "soon", "nan", "inf", 1e300, None, [1]])
def test_a_number_that_is_none_is_refused_by_the_clients_name(name: str, value: Any) -> None:
    """And as it was sent: not as seconds."""
    with pytest.raises(RequestError, match=rf"^{name} is {re.escape(repr(value))}\n") as caught:
        read(tensors(), **{name: value})
    assert caught.value.hint.startswith("give a number") and ("milliseconds" in caught.value.hint) is ("_ms" in name)


@pytest.mark.parametrize(("said", "meant"), [(0, 0), ("0", 0), (1, 1), ("P1", 1), ("2", 2), ("P2", 2)])
def test_a_priority_has_two_names(said: Any, meant: int) -> None:
    (request,) = read(tensors(), priority_class=said)
    assert request.priority == meant


@pytest.mark.parametrize("said", [True, 3, "p1", 1.0])
def test_a_priority_that_nobody_knows_is_told_both_kinds(said: Any) -> None:
    with pytest.raises(RequestError, match=r"priority_class is (True|3|'p1'|1\.0)\n  hint: P0, P1 or P2, or 0, 1 or 2"):
        read(tensors(), priority_class=said)


@pytest.mark.parametrize(
    ("starts", "ends", "problem"),
    [
        ([0, 30], [64, 128], "retention_token_range_starts begin at .0, 30."),
        ([64, 0], [128, 64], "retention_token_range_starts begin at"),
        ([0, 64], [-1, 128], "retention_token_range_starts begin at"),  # nothing comes after the end
        ([-1], [4], "retention_token_range_starts begin at"),
        ([4], [4], "retention_token_range_ends hold 4, and that range begins at 4"),
    ],
)
def test_ranges_come_in_order_without_overlap(starts: list[int], ends: list[int], problem: str) -> None:
    given = {"retention_token_range_starts": [starts], "retention_token_range_ends": [ends]}
    with pytest.raises(RequestError, match=problem):
        read(tensors(**given, retention_token_range_priorities=[[50] * len(starts)]))


@pytest.mark.parametrize("name", ["input_ids", "input_lengths", "request_output_len"])
def test_what_is_missing_is_named(name: str) -> None:
    given = tensors()
    del given[name]
    with pytest.raises(RequestError, match=f"{name} is missing"):
        read(given)
