"""Clients that leave just when they have seen the end of an answer: what a client does that waits for nothing else."""

import threading

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from pipeline.triton.grpc_gate import GrpcGate
from pipeline.triton.installation import find_installation
from pipeline.triton.server import TritonServer
from tests.serving.asking import make_inputs, text_of, tokens_of
from tests.serving.test_answers import wait_for

CLIENTS, REQUESTS = 4, 40
ASKED = {
    "tensorrt_llm": tokens_of([5], 3, streaming=[[True]], return_num_output_tokens=[[True]]),
    "tensorrt_llm_bls": text_of("hello", 3, stream=[[True]], return_num_output_tokens=[[True]]),
}


def ask_and_leave(address, model, failures):
    for _ in range(REQUESTS):
        told = threading.Event()

        def take(result, error, told=told):
            if error is not None:
                if not told.is_set():  # else it is that of leaving
                    failures.append(str(error))
                    told.set()
            elif any(output.name == "num_output_tokens" for output in result.get_response().outputs):
                told.set()  # nothing more is to come

        client = InferenceServerClient(address)
        client.start_stream(take)
        client.async_stream_infer(model, make_inputs(ASKED[model]), enable_empty_final_response=True)
        if not told.wait(30):
            failures.append("no answer")
        client.stop_stream(cancel_requests=True)
        client.close()


@pytest.fixture
def own_server(served, tmp_path):
    repository = served.repository
    server = TritonServer(
        find_installation(),
        repository=repository.path,
        backends=[repository.backends],
        log=tmp_path / "server.log",
        grace=1,
    )
    with server:
        server.start(deadline=240)
        yield server


@pytest.mark.thorough
def test_the_server_stands_it_and_can_unload_its_models(own_server):
    """It crashed, or kept a model that it could not unload, so that its end took ten seconds more."""
    upstream = f"127.0.0.1:{own_server.addresses.grpc}"
    gate = GrpcGate(upstream, host="127.0.0.1", port=0, max_bytes=1 << 20, is_ready=lambda: True)
    gate.start()
    failures = []
    threads = [
        threading.Thread(target=ask_and_leave, args=(f"127.0.0.1:{gate.port}", model, failures))
        for model in ASKED
        for _ in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    gate.close()
    assert own_server.running
    own_server.control.unload(*ASKED, deadline=60)
    log = own_server.log
    for model in ASKED:
        assert wait_for(lambda model=model: f"unloaded '{model}'" in log.read_text(), 60), model


def test_the_last_of_a_text_says_that_it_is_the_last(own_server):
    """Between it and a word of that of its own, a client that leaves made Triton crash."""
    with InferenceServerClient(f"127.0.0.1:{own_server.addresses.grpc}") as client:
        for stop in (None, [["a"]]):
            certain = {
                "embedding_bias_words": np.array([["a"]], np.object_),
                "embedding_bias_weights": np.float32([[1000]]),
            }
            words = {} if stop is None else {"stop_words": np.array(stop, np.object_)}
            responses, done = [], threading.Event()

            def take(result, error, responses=responses, done=done):
                response = result.get_response()
                responses.append(response)
                if response.parameters["triton_final_response"].bool_param:
                    done.set()

            client.start_stream(take)
            asked = {**ASKED["tensorrt_llm_bls"], **(words and {**certain, **words})}
            client.async_stream_infer("tensorrt_llm_bls", make_inputs(asked), enable_empty_final_response=True)
            assert done.wait(60)
            client.stop_stream()
            assert responses[-1].outputs, "an answer's end came by itself"
            assert sum(bool(each.parameters["triton_final_response"].bool_param) for each in responses) == 1
