"""However a client gives up, the blocks of its request are free within a few steps, which are counted: by the tokens
that were generated and that it never saw."""

import http.client
import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from pipeline.triton.client import ask_all
from pipeline.triton.grpc_gate import GrpcGate
from pipeline.triton.http_gate import HttpGate
from pipeline.triton.query import Query
from pipeline.triton.supervisor import SETTLE_S
from tests.serving.asking import ENOUGH, LENGTH, Stream, make_inputs, make_request, tokens_of
from tests.serving.test_answers import QUIET, is_idle, read_metrics, wait_for

ROOT = Path(__file__).parents[2]
MODELS = ("tensorrt_llm", "tensorrt_llm_bls", "ensemble")
# A step of this model takes some 6 ms. It takes one or two until somebody asks Triton whether the client has gone, one
# is being computed then, and another while the news travel. A machine under load may delay any of that, so that a
# longer way is tried again.
FEW, TRIES = 6, 16
ENDS = ("completed", "cancelled", "failed")  # of requests, as the metrics count them


@dataclass
class Way:
    """To a server: its own ports, or the doors that `serve` puts in front of them."""

    grpc: str
    http: str
    server: object


@pytest.fixture(scope="module")
def ways(server):
    at, options = server.addresses, {"host": "127.0.0.1", "port": 0, "max_bytes": 1 << 20, "is_ready": lambda: True}
    upstream = Way(f"127.0.0.1:{at.grpc}", f"127.0.0.1:{at.http}", server)
    gates = HttpGate(f"http://{upstream.http}", **options), GrpcGate(upstream.grpc, **options)
    for gate in gates:
        gate.start()
    http_gate, grpc_gate = gates
    yield {"itself": upstream, "doors": Way(f"127.0.0.1:{grpc_gate.port}", f"127.0.0.1:{http_gate.port}", server)}
    for gate in gates:
        gate.close()


@pytest.fixture(params=["itself", "doors"])
def way(request, ways):
    return ways[request.param]


# How a client gives up -> how many tokens it had seen then.


def cancel_stream(way, model):
    stream = Stream(way.grpc, model)
    seen = stream.seen
    stream.client.stop_stream(cancel_requests=True)
    stream.client.close()
    return seen


def stop_by_id(way, model):
    """By another request, on a connection of its own. What comes until the end, after that, it sees and does not
    want."""
    with InferenceServerClient(way.grpc) as other:
        assert other.is_server_live()
        other.start_stream(lambda result, error: None)
        stream = Stream(way.grpc, model, request_id="to-be-stopped")
        seen = stream.seen
        other.async_stream_infer(
            "tensorrt_llm", make_inputs(tokens_of([1], 1, stop=[[True]])), request_id="to-be-stopped"
        )
        assert stream.ended.wait(60)
        assert stream.errors == []
        stream.client.stop_stream()
        stream.client.close()
    return seen


def hang_up(way, model):
    """Over HTTP, in the middle of the stream."""
    arrays = make_request(model)
    body = {name: np.vectorize(_plain, otypes=[object])(array)[0].tolist() for name, array in arrays.items()}
    connection = http.client.HTTPConnection(way.http, timeout=60)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
    answer, seen = connection.getresponse(), 0
    while seen < ENOUGH:
        line = answer.readline()
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            seen += len(event["text_output"]) if "text_output" in event else np.size(event["output_ids"])
    answer.close()
    connection.close()
    return seen


def _plain(value):
    return value.decode() if isinstance(value, bytes) else value


def be_killed(way, model):
    """In the moment in which it has seen enough, by itself: whoever else killed it would come later the busier the
    machine is, and what the client had taken until then nobody would know."""
    code = f"""
        import os, signal
        from tests.serving.asking import ENOUGH, Stream

        class Killed(Stream):
            def _take(self, result, error):
                super()._take(result, error)
                if self.seen >= ENOUGH:
                    os.write(1, str(self.seen).encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        Killed({way.grpc!r}, {model!r})
    """
    client = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT, timeout=120, check=False
    )
    assert client.returncode == -signal.SIGKILL
    return int(client.stdout)


def wait_for_end(server, before):
    """Of one more request, cancelled or not, however long the machine takes; whether it was cancelled. `before`: the
    metrics."""

    def count(event, metrics):
        return metrics["nv_trt_llm_request_events", event] - before["nv_trt_llm_request_events", event]

    assert wait_for(lambda: sum(count(event, read_metrics(server)) for event in ENDS) == 1, 60)
    return count("cancelled", read_metrics(server)) == 1


def count_unseen(way, model, give_up):
    """Tokens that were generated after the client had given up; None where all of them were."""
    server = way.server

    assert wait_for(lambda: is_idle(server))
    before, generated = read_metrics(server), ("nv_trt_llm_token_metrics", "generated")
    seen = give_up(way, model)
    if not wait_for_end(server, before):
        return None
    assert is_idle(server)  # metrics are told all at once
    return int(read_metrics(server)[generated] - before[generated]) - seen


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("give_up", [cancel_stream, stop_by_id, hang_up, be_killed])
def test_blocks_are_free_within_a_few_steps(way, model, give_up, record_property):
    counts = []
    for _ in range(TRIES):
        counts.append(count_unseen(way, model, give_up))
        if counts[-1] is not None and counts[-1] <= FEW:
            break
    record_property("steps", counts)
    print(f"{model}, {give_up.__name__}: {counts} steps")
    assert counts[-1] is not None and 0 <= counts[-1] <= FEW


class EnoughError(Exception):
    pass


def test_a_query_that_is_interrupted_is_cancelled(server, client):
    """As by Ctrl-C. So small a model may have said all of its tokens before it hears of that: then once more."""

    def interrupt(text):
        raise EnoughError

    for _ in range(TRIES):
        before = read_metrics(server)
        with pytest.raises(EnoughError):
            client.ask(Query(text="hello", options={"max_tokens": LENGTH, **QUIET}), on_text=interrupt, timeout=60)
        if wait_for_end(server, before):
            break
    else:
        raise AssertionError(f"not one of {TRIES} was cancelled")
    assert wait_for(lambda: is_idle(server))


def test_queries_that_nobody_waits_for_any_more_are_cancelled(server, url):
    """As by Ctrl-C, or by a pipe that closes after the first answer: those that are being asked; no other is sent."""

    def count():
        metrics = read_metrics(server)
        return [metrics["nv_trt_llm_request_events", event] for event in ("completed", "cancelled")]

    queries = [Query(text="hello", options={"max_tokens": tokens, "end_id": -1}) for tokens in (1, *[LENGTH] * 9)]
    for _ in range(TRIES):
        time.sleep(SETTLE_S)
        before = count()
        answers = ask_all(queries, url=url, concurrency=4, timeout=60)
        assert next(answers).num_output_tokens == 1
        answers.close()
        time.sleep(SETTLE_S)
        completed, cancelled = (after - earlier for after, earlier in zip(count(), before, strict=True))
        if cancelled >= 3:
            break
    assert (completed, cancelled) in [(1, 3), (1, 4)]
