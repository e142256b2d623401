"""The gRPC door by itself, before a stand-in for Triton, as tritonclient and a load balancer see it."""

import concurrent.futures
import queue
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from pipeline.runtime.errors import ServingError
from pipeline.triton.client import Client
from pipeline.triton.errors import ServerError
from pipeline.triton.grpc_gate import HEALTH, GrpcGate
from pipeline.triton.query import Query

ROOT = Path(__file__).parents[2]
LIMIT = 100_000
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


class Upstream(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Always ready. Answers with the size of what it gets; a request to the model `endless` each 20 ms until the
    client has gone, one to `ending` once, with the word that this was all, one to `wrong` by an error, one to `slow`
    when `go` is set, one to `large` at length."""

    def __init__(self):
        self.gone, self.go, self.metadata, self.left = threading.Event(), threading.Event(), {}, None
        self.finished = threading.Event()  # of a stream: no more requests come, and it was not cancelled

    def ServerReady(self, request, context):  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request, context):  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name != "unknown")

    def ModelInfer(self, request, context):  # noqa: N802
        self.metadata, self.left = dict(context.invocation_metadata()), context.time_remaining()
        context.set_trailing_metadata((("said", "at the end"),))
        if request.model_name == "slow":
            self.go.wait(30)
        if request.model_name == "wrong":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "x: is wrong")
        return service_pb2.ModelInferResponse(
            id="x" * 50 * LIMIT if request.model_name == "large" else str(request.ByteSize())
        )

    def ModelStreamInfer(self, requests, context):  # noqa: N802
        context.add_callback(self.gone.set)
        for request in requests:
            if request.model_name == "ending":
                answer = service_pb2.ModelInferResponse(model_name="ending", id=request.id)
                answer.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=answer)
                continue
            while True:
                yield service_pb2.ModelStreamInferResponse(
                    infer_response=service_pb2.ModelInferResponse(id=str(request.ByteSize()))
                )
                if request.model_name != "endless":
                    break
                time.sleep(0.02)
        time.sleep(0.2)  # of a stream that is cancelled, the end of its requests is seen first
        if context.is_active():
            self.finished.set()


class Health(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == f"{HEALTH}Check":
            return grpc.unary_unary_rpc_method_handler(lambda request, context: SERVING)
        return None


@pytest.fixture
def upstream():
    return Upstream()


@pytest.fixture
def triton(upstream):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(upstream, server)
    server.add_generic_rpc_handlers((Health(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    upstream.go.set()
    server.stop(0).wait()


def open_gate(upstream, **options):
    gate = GrpcGate(
        upstream, **{"host": "127.0.0.1", "port": 0, "max_bytes": LIMIT, "is_ready": lambda: True, **options}
    )
    gate.start()
    return gate


@pytest.fixture
def gate(triton):
    state = {"ready": True}
    gate = open_gate(triton, is_ready=lambda: state["ready"])
    gate.state = state
    yield gate
    gate.close()


@pytest.fixture
def client(gate):
    with InferenceServerClient(f"127.0.0.1:{gate.port}") as client:
        yield client


def make_inputs(nbytes):
    tensor = InferInput("x", [nbytes], "UINT8")
    tensor.set_data_from_numpy(np.zeros(nbytes, np.uint8))
    return [tensor]


def infer(client, nbytes=10, model="m", **options):
    """The size of the request, as Triton saw it."""
    return int(client.infer(model, make_inputs(nbytes), **options).get_response().id)


def start_stream(client):
    replies = queue.SimpleQueue()
    client.start_stream(lambda result, error: replies.put(error or result.get_response().id))
    return replies


def check_health(gate):
    """As a load balancer does."""
    with grpc.insecure_channel(f"127.0.0.1:{gate.port}") as channel:
        return channel.unary_unary(f"{HEALTH}Check")(b"", timeout=10)


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def refused(caught):
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_requests_and_answers_pass_unchanged(client, upstream):
    assert infer(client, 10_000) > 10_000
    infer(client, headers={"x-sent": "yes", "triton_grpc_error": "true"}, client_timeout=20.0)
    assert (upstream.metadata["x-sent"], upstream.metadata["triton_grpc_error"]) == ("yes", "true")
    assert 15 < upstream.left < 21
    assert infer(client, 50_000, compression_algorithm="gzip") > 50_000
    with pytest.raises(InferenceServerException) as caught:
        infer(client, model="wrong")
    assert refused(caught) == ("INVALID_ARGUMENT", "x: is wrong")
    with pytest.raises(InferenceServerException) as caught:
        client.get_server_metadata()
    assert refused(caught)[0] == "UNIMPLEMENTED"


def test_metadata_at_the_end_passes(gate):
    with grpc.insecure_channel(f"127.0.0.1:{gate.port}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        _, call = call.with_call(service_pb2.ModelInferRequest(), timeout=10)
        assert ("said", "at the end") in call.trailing_metadata()


def test_an_answer_may_be_larger_than_a_request(client):
    assert len(client.infer("large", make_inputs(10)).get_response().id) == 50 * LIMIT


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("nbytes", [LIMIT, 50 * LIMIT])
def test_large_messages_are_refused(client, nbytes, compression):
    """Also those that are large unpacked only."""
    assert infer(client, LIMIT - 100, compression_algorithm=compression) <= LIMIT
    with pytest.raises(InferenceServerException) as caught:
        infer(client, nbytes, compression_algorithm=compression)
    code, message = refused(caught)
    assert code == "RESOURCE_EXHAUSTED"
    assert "essage larger than max" in message
    assert infer(client) < 100  # the connection is as good as before


def test_who_asks_by_our_client_is_told_what_bounds_a_request(gate):
    """gRPC's own words are all that others get: the message is never taken."""
    with Client(f"127.0.0.1:{gate.port}") as ours, pytest.raises(ServingError) as caught:
        ours.ask(Query(text="x" * 2 * LIMIT, options={"max_tokens": 1}), timeout=10)
    assert "essage larger than max" in caught.value.message and "serve --max-request-mb" in caught.value.hint


def test_a_large_message_ends_its_stream_and_no_other(gate, client):
    with InferenceServerClient(f"127.0.0.1:{gate.port}") as other:
        theirs, ours = start_stream(other), start_stream(client)
        for wanted, replies in ((client, ours), (other, theirs)):
            wanted.async_stream_infer("m", make_inputs(10))
            assert int(replies.get(timeout=10)) < 100
        client.async_stream_infer("m", make_inputs(LIMIT))
        error = ours.get(timeout=10)
        assert error.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert f"({LIMIT + 24} vs. {LIMIT})" in error.message()
        other.async_stream_infer("m", make_inputs(10))
        assert int(theirs.get(timeout=10)) < 100


def test_readiness_is_the_supervisors(gate, client):
    assert client.is_server_ready() and client.is_model_ready("m") and not client.is_model_ready("unknown")
    assert check_health(gate) == SERVING
    gate.state["ready"] = False
    assert not client.is_server_ready() and not client.is_model_ready("m")
    assert check_health(gate) == NOT_SERVING
    assert infer(client)  # as over HTTP: what comes all the same may be answered


def test_draining_refuses_new_requests_and_says_so(gate, client, upstream):
    """What comes over open streams the models refuse, which know an order to stop from a request."""
    replies = start_stream(client)
    client.async_stream_infer("m", make_inputs(10))
    replies.get(timeout=10)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, InferenceServerClient(f"127.0.0.1:{gate.port}") as other:
        begun = pool.submit(infer, other, model="slow")
        wait_for(lambda: gate.in_flight == 1)
        gate.draining = True
        assert not client.is_server_ready() and not client.is_model_ready("m")
        assert check_health(gate) == NOT_SERVING
        with pytest.raises(InferenceServerException) as caught:
            infer(other)
        assert refused(caught) == ("UNAVAILABLE", "the server is shutting down")
        refusals = start_stream(other)
        assert refusals.get(timeout=10).message() == "the server is shutting down"
        client.async_stream_infer("m", make_inputs(10))
        assert int(replies.get(timeout=10)) < 100
        upstream.go.set()
        assert begun.result(10) < 100
    assert gate.in_flight == 0
    gate.close()
    error = replies.get(timeout=10)
    assert (error.status(), error.message()) == ("StatusCode.UNAVAILABLE", "the server is shutting down")


def test_a_stream_comes_as_it_is_made_and_ends_with_its_client(client, upstream):
    replies = start_stream(client)
    client.async_stream_infer("endless", make_inputs(10))
    for _ in range(3):
        assert int(replies.get(timeout=10)) < 100
    assert not upstream.gone.is_set()
    client.stop_stream(cancel_requests=True)
    assert upstream.gone.wait(10)


def test_what_a_failed_model_owes_is_ended_and_nothing_else(gate, client, upstream):
    """A request, and a stream that is in the middle of an answer; another model's stream goes on."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, InferenceServerClient(f"127.0.0.1:{gate.port}") as other:
        waiting = pool.submit(infer, InferenceServerClient(f"127.0.0.1:{gate.port}"), model="slow")
        wait_for(lambda: upstream.metadata)
        theirs, ours = start_stream(other), start_stream(client)
        other.async_stream_infer("m", make_inputs(10))
        assert int(theirs.get(timeout=10)) < 100
        client.async_stream_infer("endless", make_inputs(10))
        assert int(ours.get(timeout=10)) < 100
        gate.fail("they failed: ask again", ["endless", "slow"])
        with pytest.raises(InferenceServerException) as caught:
            waiting.result(10)
        assert refused(caught) == ("UNAVAILABLE", "they failed: ask again")
        while isinstance(last := ours.get(timeout=10), str):
            pass
        assert (last.status(), last.message()) == ("StatusCode.UNAVAILABLE", "they failed: ask again")
        assert upstream.gone.wait(10)
        other.async_stream_infer("m", make_inputs(10))
        assert int(theirs.get(timeout=10)) < 100
        client.stop_stream()
        replies = start_stream(client)  # and the model may be asked again
        client.async_stream_infer("endless", make_inputs(10))
        assert int(replies.get(timeout=10)) < 100
        client.stop_stream(cancel_requests=True)


@pytest.mark.parametrize(("model", "answered"), [("ending", True), ("m", False)])
def test_who_goes_with_all_answers_cancels_nothing(client, upstream, model, answered):
    """Triton does not stand it: a request that is cancelled just when it ends."""
    replies = start_stream(client)
    client.async_stream_infer(model, make_inputs(10), request_id="7")
    assert isinstance(replies.get(timeout=10), str)
    client.stop_stream(cancel_requests=True)
    assert upstream.gone.wait(10)
    wait_for(lambda: upstream.finished.is_set() or not answered)
    assert upstream.finished.is_set() is answered


def test_a_stream_outlives_a_model_that_has_answered_it(gate, client, upstream):
    """And one that owes it nothing else than what another instance of it answers."""
    replies = start_stream(client)
    client.async_stream_infer("ending", make_inputs(10), request_id="7")
    assert replies.get(timeout=10) == "7"
    client.async_stream_infer("endless", make_inputs(10))
    assert int(replies.get(timeout=10)) < 100
    gate.fail("it failed: ask again", ["ending"])
    now = time.monotonic()
    assert int(replies.get(timeout=10)) < 100
    wait_for(lambda: gate.count_silent(["endless"], now) == 0)
    gate.fail("it failed: ask again", ["endless"], silent_since=now)
    for _ in range(10):
        assert int(replies.get(timeout=10)) < 100
    assert gate.count_silent(["endless"], time.monotonic() + 60) == 1
    gate.fail("it failed: ask again", ["endless"], silent_since=time.monotonic() + 60)
    while isinstance(last := replies.get(timeout=10), str):
        pass
    assert last.message() == "it failed: ask again"


def test_a_client_that_is_killed_is_gone_for_triton_too(gate, upstream):
    code = f"""
        import time
        from tritonclient.grpc import InferenceServerClient
        from tests.triton.test_grpc_gate import make_inputs, start_stream
        client = InferenceServerClient("127.0.0.1:{gate.port}")
        replies = start_stream(client)
        client.async_stream_infer("endless", make_inputs(10))
        print(replies.get(timeout=10), flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT)
    with owner.stdout as output:
        assert output.readline()
    assert not upstream.gone.is_set()
    owner.kill()
    owner.wait()
    assert upstream.gone.wait(10)


def test_who_speaks_tls_is_refused_and_others_are_answered(gate, client):
    before = infer(client)
    with InferenceServerClient(f"127.0.0.1:{gate.port}", ssl=True) as wrong:
        with pytest.raises(InferenceServerException, match=r"(?i)tls|ssl|connect"):
            wrong.is_server_live(client_timeout=10)
        assert infer(client) == before
    assert gate.in_flight == 0


def test_an_absent_server_is_unavailable_and_one_that_comes_back_is_found():
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    state = {"ready": True}
    gate = open_gate(f"127.0.0.1:{port}", is_ready=lambda: state["ready"])
    try:
        with InferenceServerClient(f"127.0.0.1:{gate.port}") as client:
            with pytest.raises(InferenceServerException) as caught:
                infer(client)
            assert refused(caught) == ("UNAVAILABLE", "tritonserver does not answer")
            state["ready"] = False
            with pytest.raises(InferenceServerException) as caught:
                infer(client)
            assert refused(caught) == ("UNAVAILABLE", "the server is not ready: it loads its models")
            held.close()
            server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Upstream(), server)
            server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
            time.sleep(0.7)  # longer than the gate waits between two tries
            assert infer(client) < 100
            server.stop(0).wait()
    finally:
        gate.close()


def test_a_taken_port_is_named(gate):
    other = GrpcGate(gate.upstream, host="127.0.0.1", port=gate.port, max_bytes=LIMIT, is_ready=lambda: True)
    with pytest.raises(ServerError, match=f"127.0.0.1:{gate.port} cannot be listened on: Address") as caught:
        other.start()
    assert caught.value.hint == "choose another --grpc-port or --host"


def test_a_host_that_is_none_is_named():
    other = GrpcGate("127.0.0.1:9", host="none.invalid", port=0, max_bytes=LIMIT, is_ready=lambda: True)
    with pytest.raises(ServerError, match=r"none\.invalid:0 cannot be listened on: \w"):
        other.start()
