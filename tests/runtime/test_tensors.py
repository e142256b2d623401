from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_repo
from pipeline.runtime.errors import RequestError
from pipeline.runtime.request import Priority
from pipeline.runtime.tensors import ELSEWHERE, REFUSED, REQUEST, SAMPLING, read_request


def tensors(**values: Any) -> dict[str, np.ndarray]:
    made = {"input_ids": np.array([[5, 6, 7]], np.int32), "request_output_len": np.array([[4]], np.int32)}
    return {**made, **{name: np.asarray(value) for name, value in values.items()}}


def test_every_input_of_the_model_is_read_or_refused() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    text = (Path(model_repo.__path__[0]) / "tensorrt_llm" / "config.pbtxt").read_text()
    config = text_format.Parse(text, ModelConfig())
    known = {*REQUEST, *SAMPLING, *ELSEWHERE, *REFUSED}
    assert {tensor.name for tensor in config.input} <= known
    assert known - {tensor.name for tensor in config.input} == {"min_length", "random_seed"}  # v0.19's names


def test_all_that_is_served_arrives() -> None:
    request = read_request(
        tensors(
            input_lengths=[[2]],
            end_id=[[1]],
            pad_id=[0],
            stop_words_list=[[[3, 4, 9, 0], [2, 3, -1, -1]]],
            bad_words_list=[[8, 7], [1, 2]],
            embedding_bias=np.arange(3, dtype=np.float32)[None],
            num_return_sequences=[2],
            beam_width=[[1]],
            temperature=np.array([[0.5]], np.float32),
            runtime_top_k=[5],
            runtime_top_p=np.float32([0.75]),
            runtime_top_p_min=np.float32([0.25]),
            runtime_top_p_decay=np.float32([0.5]),
            runtime_top_p_reset_ids=[3],
            repetition_penalty=np.float32([1.5]),
            presence_penalty=np.float32([0.5]),
            frequency_penalty=np.float32([-0.5]),
            min_tokens=[2],
            seed=np.array([2**64 - 1], np.uint64),
            return_log_probs=[True],
            return_context_logits=[True],
            return_generation_logits=[True],
            exclude_input_in_output=[True],
            streaming=[True],
            len_penalty=np.float32([1.0]),
        ),
        request_id="a",
        priority=Priority.P0,
        timeout=3.0,
    )
    assert (request.input_ids, request.max_tokens, request.end_id, request.pad_id) == ((5, 6), 4, 1, 0)
    assert request.stop_words == ((3, 4), (9,)) and request.num_return_sequences == 2
    assert request.return_log_probs and request.return_context_logits and request.return_generation_logits
    assert request.exclude_input_in_output and request.streaming
    assert (request.request_id, request.priority, request.timeout) == ("a", Priority.P0, 3.0)
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.seed, s.min_tokens) == (0.5, 5, 0.75, 2**64 - 1, 2)
    assert (s.top_p_min, s.top_p_decay, s.top_p_reset_id) == (0.25, 0.5, 3)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.5, 0.5, -0.5)
    assert s.bad_words == ((8,), (7,)) and s.embedding_bias is not None and s.embedding_bias.tolist() == [0, 1, 2]


def test_the_names_of_v0_19_and_empty_lists() -> None:
    empty = np.array([[[0], [-1]]], np.int32)
    request = read_request(
        tensors(
            min_length=[3],
            random_seed=[9],
            stop_words_list=empty,
            bad_words_list=np.zeros((1, 2, 0)),
            embedding_bias=[],
        )
    )
    assert request.sampling.min_tokens == 3 and request.sampling.seed == 9
    assert request.stop_words == () == request.sampling.bad_words and request.sampling.embedding_bias is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lora_task_id": [1]}, "lora_task_id is for LoRA, which is not served"),
        ({"draft_input_ids": [1]}, "speculative"),
        ({"guided_decoding_guide": [b"{}"]}, "guided"),
        ({"top_k": [1]}, "top_k is not an input"),
        ({"beam_width": [[4]]}, "beam_width is 4"),
        ({"temperature": [0.5, 0.5]}, "temperature has the shape"),
        ({"input_ids": [[1], [2]]}, "input_ids has the shape"),
        ({"input_lengths": [[4]]}, "input_lengths is 4, and input_ids has 3"),
        ({"input_lengths": [[0]]}, "input_lengths is 0"),
        ({"stop_words_list": [[[1, 2, 3]]]}, "stop_words_list has the shape"),
        ({"stop_words_list": [[1, 2], [2, 1]]}, "stop_words_list has the word ends"),
        ({"bad_words_list": [[1, 2], [3, -1]]}, "bad_words_list has the word ends"),
        ({"bad_words_list": [[1, 2], [-1, 2]]}, "bad_words_list has the word ends"),
        ({"runtime_top_p": [1.5]}, "top_p is 1.5"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_request(tensors(**values))


@pytest.mark.parametrize("name", ["input_ids", "request_output_len"])
def test_what_is_missing_is_named(name: str) -> None:
    given = tensors()
    del given[name]
    with pytest.raises(RequestError, match=f"{name} is missing"):
        read_request(given)
