from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.runtime.errors import RequestError
from pipeline.runtime.request import Priority, Request, check_request
from pipeline.runtime.sampling import RANGES, Sampling


def request(**values: Any) -> Request:
    return Request(**{"input_ids": (1, 2, 3), "max_tokens": 4, **values})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", ()),
        ("input_ids", (1, -1)),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("end_id", -2),
        ("pad_id", 2**31),
        ("num_return_sequences", 0),
        ("beam_width", 2),
        ("beam_width", 0),
        ("stop_words", ((),)),
        ("stop_words", ((1, -5),)),
        ("timeout", -1),
        ("queue_timeout", float("nan")),
        ("priority", 3),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        request(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", [*RANGES, "seed"])
@pytest.mark.parametrize("value", [-2000, 1e30, float("nan"), float("inf"), "1", None])
def test_a_sampling_value_outside_its_range_is_named(field: str, value: Any) -> None:
    if field == "seed" and value is None:
        pytest.skip("a seed may be left to the executor")
    with pytest.raises(RequestError, match=field) as caught:
        Sampling(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0.0},
        {"bad_words": ((),)},
        {"embedding_bias": np.zeros((2, 2))},
        {"embedding_bias": np.array([np.nan])},
        {"embedding_bias": np.array([np.inf])},
    ],
)
def test_more_that_sampling_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        Sampling(**values)


def test_beams_are_refused_with_the_way_out() -> None:
    with pytest.raises(RequestError, match="num_return_sequences draws several"):
        request(beam_width=4)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_tokens": 8}, "max_tokens is 8, after a prompt of 3 tokens: at most 10"),
        ({"input_ids": (1, 50)}, "input_ids holds the token 50, outside the vocabulary of 50"),
        ({"end_id": 50}, "end_id holds the token 50"),
        ({"stop_words": ((1, 77),)}, "stop_words or bad_words holds the token 77"),
        ({"sampling": Sampling(bad_words=((60,),))}, "stop_words or bad_words holds the token 60"),
        ({"sampling": Sampling(embedding_bias=np.zeros(49))}, "embedding_bias has 49 entries, the vocabulary 50"),
    ],
)
def test_what_this_network_cannot_run_is_named(values: dict[str, Any], problem: str) -> None:
    check_request(request(), vocab_size=50, max_seq_len=10)
    with pytest.raises(RequestError, match=problem):
        check_request(request(**values), vocab_size=50, max_seq_len=10)


def test_values_are_made_plain() -> None:
    made = request(input_ids=np.array([4, 5], np.int32), stop_words=[[1, 2]], priority=2)
    assert made.input_ids == (4, 5) and type(made.input_ids[0]) is int
    assert made.stop_words == ((1, 2),) and made.priority is Priority.P2
    assert Sampling(embedding_bias=np.zeros(3, np.float64)).embedding_bias.dtype == np.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "greedy"),
    [({}, True), ({"top_k": 1}, True), ({"temperature": 0.0, "top_p": 0.9}, True), ({"temperature": 0.5}, True),
     ({"top_k": 5}, False), ({"top_p": 1.0}, False), ({"top_p": 0.5, "top_k": 0}, False)],
)  # fmt: skip
def test_what_is_greedy_is_as_in_tensorrt_llm(values: dict[str, Any], greedy: bool) -> None:
    assert Sampling(**values).is_greedy is greedy
