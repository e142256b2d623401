"""What of gRPC's messages tells who owes an answer."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from tritonclient.grpc import service_pb2

from pipeline.triton.owed import MOST, Owed, read_model


def request(model: str, identity: str = "") -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=identity, model_version="1")
    message.parameters["timeout_ms"].string_param = "5"
    message.raw_input_contents.append(b"x" * 1000)
    return bytes(message.SerializeToString())


def answer(model: str, identity: str = "", *, final: bool, error: str = "", size: int = 300) -> bytes:
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    response = message.infer_response
    response.model_name, response.model_version, response.id = model, "1", identity
    response.parameters["triton_final_response"].bool_param = final
    response.parameters["other"].string_param = "z" * size
    response.raw_output_contents.append(b"\n\x15triton_final_response\x12\x02\x08\x01")
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("name", "found"), [("tensorrt_llm", "tensorrt_llm"), ("m", "m"), ("", ""), ("m" * 127, "m" * 127), ("m" * 128, "")]
)
def test_the_model_is_what_a_request_begins_with(name: str, found: str) -> None:
    assert read_model(service_pb2.ModelInferRequest(model_name=name, id="5").SerializeToString()) == found
    assert read_model(b"") == read_model(b"\x0a") == ""


@pytest.mark.parametrize("error", ["", "it is wrong: " + "e" * 300])
def test_a_model_owes_until_its_last_answer(error: str) -> None:
    """That of the request of the same name, whatever its size."""
    owed = Owed()
    for model, identity in (("a", "1"), ("a", "2"), ("b", "1"), ("b", "1")):
        owed.ask(request(model, identity))
    assert owed.models == {"a", "b"}
    owed.hear_stream(answer("a", "1", final=False))
    owed.hear_stream(answer("a", "1", final=True, error=error))
    assert owed.models == {"a", "b"}
    owed.hear_stream(answer("a", "2", final=True, size=5000))
    assert owed.models == {"b"}
    owed.hear_stream(answer("b", "1", final=True))
    assert owed.models == {"b"}  # one more
    owed.hear_stream(answer("b", "1", final=True))
    assert owed.models == set()
    owed.hear_stream(answer("b", "1", final=True))  # of nothing that is known
    assert owed.models == set()


def test_answers_without_names_and_what_is_no_message_change_nothing() -> None:
    owed = Owed("h")
    owed.ask(request("a", "1"))
    whole = answer("a", "1", final=True)
    bare = service_pb2.ModelStreamInferResponse(error_message="no").SerializeToString()
    for message in (b"", b"\xff" * 30, whole[:3], whole[: len(whole) // 40], bare, answer("", "1", final=True)):
        owed.hear_stream(message)
    assert owed.models == {"a", "h"}


def test_what_is_never_said_to_end_is_owed_and_takes_little_memory() -> None:
    owed = Owed()
    for number in range(MOST + 5):
        owed.ask(request("a", str(number)))
    owed.ask(request("b", "1"))
    owed.hear_stream(answer("b", "1", final=True))
    assert owed.models == {"a"}
    assert len(owed._open) < 10


def test_who_hears_nothing_is_silent() -> None:
    owed, before = Owed("m"), time.monotonic()
    assert owed.is_silent(before)
    owed.hear()
    assert not owed.is_silent(before)
    assert owed.is_silent(time.monotonic() + 1)


@pytest.mark.parametrize("identity", ["", "2"])
def test_what_triton_refuses_is_not_owed_any_more(identity: str) -> None:
    """It then names no model, and says nothing of an end: only which id, and why."""
    owed = Owed()
    for model, name in (("a", "1"), ("a", identity), ("b", identity)):
        owed.ask(request(model, name))
    refusal = service_pb2.ModelStreamInferResponse(error_message="unexpected shape for input 'x'")
    refusal.infer_response.id = identity
    owed.hear_stream(refusal.SerializeToString())
    assert owed.models == {"a", "b"}
    owed.hear_stream(refusal.SerializeToString())
    assert owed.models == {"a"}  # that of the other id
    owed.hear_stream(refusal.SerializeToString())  # of nothing that is known
    owed.hear_stream(answer("a", "1", final=True))
    assert owed.models == set()


def test_an_error_of_a_model_that_goes_on_ends_nothing() -> None:
    owed = Owed()
    owed.ask(request("a", "1"))
    owed.hear_stream(answer("a", "1", final=False, error="one row of two"))
    assert owed.models == {"a"}


def test_a_message_of_millions_of_fields_is_read_in_no_time() -> None:
    owed, message = Owed(), b"\n\x0ctensorrt_llm" + b"\x12\0" * 8_000_000
    began = time.monotonic()
    owed.ask(message)
    assert time.monotonic() - began < 1
    assert owed.models == {"tensorrt_llm"}


def test_another_thread_may_look_while_requests_come_and_go() -> None:
    owed, done = Owed(), threading.Event()
    for number in range(2000):
        owed.ask(request("a", str(number)))
    messages = [(request("a", "x"), answer("a", "x", final=True))] * 3000

    def come_and_go() -> None:
        for asked, answered in messages:
            owed.ask(asked)
            owed.hear_stream(answered)
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=come_and_go)
        thread.start()
        while not done.is_set():
            assert owed.models == {"a"}
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_answers_take_no_longer_where_much_is_open() -> None:
    owed = Owed()
    for number in range(MOST):
        owed.ask(request("a", str(number)))
    began = time.monotonic()
    for number in range(MOST):
        owed.hear_stream(answer("a", str(number), final=True))
    assert time.monotonic() - began < 2  # it was quadratic: 8 s
    assert owed.models == set()
