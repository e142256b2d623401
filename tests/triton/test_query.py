"""What a query may hold, and its tensors. Answers are tested in tests/serving, in a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pipeline.runtime.errors import ServingError
from pipeline.triton.client import Client, _explain
from pipeline.triton.errors import ServerError
from pipeline.triton.model_config import load_base
from pipeline.triton.query import NUMPY, OPTIONS, Query, build_inputs, build_parameters


def test_every_option_is_a_tensor_of_both_models() -> None:
    for place, model in enumerate(("tensorrt_llm_bls", "tensorrt_llm")):
        declared = {tensor.name: tensor.data_type for tensor in load_base(model).input}
        names = {names[place] for names in OPTIONS.values()}
        assert names <= declared.keys()


def test_tensors_of_text_and_of_tokens() -> None:
    options = {"max_tokens": 5, "temperature": 1, "seed": 2**64 - 1, "return_log_probs": True}
    text = {tensor.name(): tensor for tensor in build_inputs(Query(text="a", options=options, stop=["b", "c"]))}
    assert list(text["stop_words"].shape()) == [1, 2] and text["stream"].datatype() == "BOOL"
    tokens = {tensor.name(): tensor for tensor in build_inputs(Query(input_ids=[1, 2], options=options, stream=False))}
    assert list(tokens["input_ids"].shape()) == [1, 2]
    assert np.frombuffer(tokens["request_output_len"]._get_content(), NUMPY["INT32"]).tolist() == [5]
    assert np.frombuffer(tokens["seed"]._get_content(), NUMPY["UINT64"]).tolist() == [2**64 - 1]


def test_ids_are_asked_of_the_text_model_alone() -> None:
    asked = {"priority_class": "P0"}
    assert build_parameters(Query(text="a", ids=True, parameters=asked)) == {**asked, "return_output_ids": True}
    assert build_parameters(Query(text="a", parameters=asked)) == asked
    assert build_parameters(Query(input_ids=[1], ids=True)) == {}  # whose answers are ids


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "one of text, messages and input_ids"),
        ({"text": "a", "input_ids": [1]}, "one of text, messages and input_ids"),
        ({"text": 5}, "the text is 5, not text"),
        ({"input_ids": "abc"}, "input_ids are 'abc', not a list"),
        ({"input_ids": [1.5]}, "not a list of whole numbers"),
        ({"input_ids": [True]}, "not a list of whole numbers"),
        ({"input_ids": [2**31]}, "not a list of whole numbers"),
        ({"messages": "hi"}, "messages are 'hi', not a list of objects"),
        ({"messages": ["hi"]}, "not a list of objects"),
        ({"text": "a", "stop": "x"}, "stop is 'x', not a list of texts"),
        ({"text": "a", "parameters": []}, "parameters are"),
        ({"text": "a", "parameters": {"priority": 1}}, "the parameter 'priority' is Triton's own"),
        ({"text": "a", "parameters": {"triton_x": "y"}}, "the parameter 'triton_x' is Triton's own"),
        ({"text": "a", "parameters": {"x": [1]}}, r"the parameter x is \[1\], not text"),
        ({"text": "a", "parameters": {"x": None}}, "the parameter x is None, not text"),
        ({"text": "a", "parameters": {"x": 2**63}}, "the parameter x is 9223372036854775808, not text"),
        ({"text": "a", "parameters": {"x": "\udce9"}}, "the parameter x is '.udce9', not text"),
        ({"text": "a", "options": {"max_tokens": "three"}}, "max_tokens is 'three', not a whole number"),
        ({"text": "a", "options": {"max_tokens": 2**31}}, "max_tokens is 2147483648"),
        ({"text": "a", "options": {"seed": -1}}, "seed is -1"),
        ({"text": "a", "options": {"temperature": "hot"}}, "temperature is 'hot', not a finite number"),
        ({"text": "a", "options": {"temperature": 10**400}}, "temperature is 1000"),
        ({"text": "a", "options": {"top_p": float("nan")}}, "top_p is nan, not a finite number"),
        ({"text": "a", "options": {"top_p": float("inf")}}, "top_p is inf, not a finite number"),
        ({"text": "a", "options": {"return_log_probs": 1}}, "return_log_probs is 1, not true or false"),
        ({"text": "a", "options": {"heat": 1}}, "unknown options heat"),
        ({"input_ids": [1], "stop": ["x"]}, "stop strings need text"),
        ({"text": "caf\udce9"}, "holds bytes that are not UTF-8"),
        ({"text": "a", "stop": ["\udce9"]}, "holds bytes that are not UTF-8"),
        ({"messages": [{"role": "user", "content": "\udce9"}]}, "holds bytes that are not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ServingError, match=problem):
        Query(**fields)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed: Connection refused",
            "Connection refused",
        ),
        (
            "errors resolving http://h:9: [field:hostname lookup error:address lookup failed for http://h:9: "
            "Misformatted domain name]",
            "Misformatted domain name",
        ),
        ("DNS resolution failed for nowhere:9: C-ares status is not ARES_SUCCESS", "C-ares status"),
    ],
)
def test_an_absent_server_is_said_in_few_words(message: str, words: str) -> None:
    class RefusedError(Exception):
        def status(self) -> str:
            return "StatusCode.UNAVAILABLE"

        def message(self) -> str:
            return message

    error = _explain(RefusedError(), "here:9")
    assert isinstance(error, ServerError)
    assert error.message.startswith(f"no server answers at here:9: {words}")
    assert error.hint is not None and "HOST:PORT" in error.hint


def test_what_the_client_library_refuses_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent then, and nobody answers."""

    def refuse(*_: object, **__: object) -> None:
        raise InferenceServerException("no such thing")

    with Client("127.0.0.1:9") as client:
        monkeypatch.setattr(client._client, "async_stream_infer", refuse)
        with pytest.raises(ServingError, match="no such thing"):
            client.ask(Query(text="a"), timeout=30)
