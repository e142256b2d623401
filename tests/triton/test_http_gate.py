"""The HTTP door by itself, before a stand-in for Triton."""

import contextlib
import gzip
import http.client
import http.server
import json
import socket
import ssl
import threading
import time
import zlib

import aiohttp.web
import pytest

from pipeline.triton.errors import ServerError
from pipeline.triton.http_gate import HEADER_LENGTH, HttpGate, find_problem

LIMIT = 10_000


class Upstream(http.server.BaseHTTPRequestHandler):
    """Echoes; generate_stream sends an event each 50 ms until the client has gone. What is asked of the model `silent`
    is not answered, and of `broken` only half."""

    protocol_version = "HTTP/1.1"
    gone = threading.Event()

    def do_GET(self):
        self.answer(b"got " + self.path.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/silent/" in self.path:
            self.gone.wait(30)
            self.close_connection = True
            return
        if "/broken/" in self.path:
            streams = "stream" in self.path
            self.send_response(200)
            self.send_header(*(("Transfer-Encoding", "chunked") if streams else ("Content-Length", "1000")))
            self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
            self.end_headers()
            self.wfile.write(b'f\r\ndata: {"text_ou\r\n' if streams else b'{"text_ou')
            self.close_connection = True
            return
        if self.path != "/v2/models/m/generate_stream":
            seen = {
                "X-Seen": self.headers.get("X-Sent", ""),
                "X-Encoding": self.headers.get("Content-Encoding", "none"),
            }
            self.answer(body, seen)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for _ in range(200):
                self.wfile.write(b"6\r\ndata: \r\n")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            self.gone.set()
        self.close_connection = True

    def answer(self, body, headers=None):
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def gate():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state = {"ready": True}
    gate = HttpGate(
        f"http://127.0.0.1:{server.server_port}",
        host="127.0.0.1",
        port=0,
        max_bytes=LIMIT,
        is_ready=lambda: state["ready"],
    )
    gate.state = state
    gate.start()
    yield gate
    gate.close()
    server.shutdown()
    server.server_close()
    thread.join()


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def send(gate, method, path, body=None, headers=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        text = answer.read()
    return answer.status, text, dict(answer.headers)


def test_requests_and_answers_pass_unchanged(gate):
    assert send(gate, "GET", "/v2/models/m?x=1%2C2")[:2] == (200, b"got /v2/models/m?x=1%2C2")
    status, body, headers = send(gate, "POST", "/v2/models/m/generate", b"\x00abc", {"X-Sent": "yes"})
    assert (status, body, headers["X-Seen"]) == (200, b"\x00abc", "yes")


MODELS = ["/v2/models/m/ready", "/v2/models/m/versions/1/ready"]


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("Deflate", zlib.compress)])
def test_a_compressed_request_is_judged_and_passed_on_as_what_is_in_it(gate, encoding, pack):
    headers = {"content-Encoding": encoding, "X-Sent": "yes"}
    status, body, seen = send(gate, "POST", "/v2/models/m/infer", pack(infer([5])), headers)
    assert (status, body, seen["X-Seen"], seen["X-Encoding"]) == (200, infer([5]), "yes", "none")
    assert send(gate, "POST", "/v2/models/m/infer", pack(infer([2**63 - 1])), headers)[0] == 400
    assert send(gate, "POST", "/v2/models/m/generate", pack(b"x" * (LIMIT + 1)), headers)[0] == 413
    assert send(gate, "POST", "/v2/models/m/generate", b"not packed", headers)[0] == 400
    assert send(gate, "GET", "/v2")[0] == 200


def test_readiness_is_the_supervisors(gate):
    """Triton says of models that they are ready, whatever becomes of their processes; of an unknown one it knows."""
    assert send(gate, "GET", "/v2/health/ready")[0] == 200
    assert [send(gate, "GET", path)[1].decode() for path in MODELS] == [f"got {path}" for path in MODELS]
    gate.state["ready"] = False
    assert {send(gate, "GET", path)[0] for path in ("/v2/health/ready", *MODELS)} == {503}
    assert {send(gate, "GET", path)[0] for path in ("/v2/health/live", "/v2/models/m", "/v2/models/ready")} == {200}


def test_large_requests_are_refused(gate):
    assert send(gate, "POST", "/v2/models/m/generate", b"x" * LIMIT)[0] == 200
    status, body, _ = send(gate, "POST", "/v2/models/m/generate", b"x" * (LIMIT + 1))
    assert status == 413
    assert f"{LIMIT} bytes (serve --max-request-mb)" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", "/v2/repository/models/m/load", "/v2/logging", "/v2/trace/setting"]
)
def test_what_runs_code_is_closed(gate, path):
    assert send(gate, "POST", path, b"{}")[0] == 403


def test_draining_refuses_new_requests_and_says_so(gate):
    gate.draining = True
    assert {send(gate, "GET", path)[0] for path in ("/v2/health/ready", *MODELS)} == {503}
    assert send(gate, "POST", "/v2/models/m/generate", b"{}")[0] == 503


def test_a_stream_comes_as_it_is_made_and_ends_with_its_client(gate):
    Upstream.gone.clear()
    connection = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
    connection.request("POST", "/v2/models/m/generate_stream", b"{}")
    began = time.monotonic()
    answer = connection.getresponse()
    assert answer.read(6) == b"data: "
    assert time.monotonic() - began < 5
    assert gate.in_flight == 1
    answer.close()
    connection.close()
    assert Upstream.gone.wait(10)
    wait_for(lambda: gate.in_flight == 0)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_nothing_is_said_of_a_client_that_goes_away_while_it_is_written_to(gate, caplog, monkeypatch, pieces):
    """Its connection is closing, and the gate has not been told of it yet."""
    write, sent = aiohttp.web.StreamResponse.write, []

    async def write_to_nobody(response, data):
        sent.append(data)
        if len(sent) > pieces:
            response._req.transport.abort()
        await write(response, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", write_to_nobody)
    Upstream.gone.clear()
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        send(gate, "POST", "/v2/models/m/generate_stream", b"{}")
    assert Upstream.gone.wait(10)
    wait_for(lambda: gate.in_flight == 0)
    with pytest.raises((http.client.HTTPException, ConnectionError)):  # all of it in one piece
        send(gate, "POST", "/v2/models/m/generate", b"x")
    monkeypatch.undo()
    assert send(gate, "POST", "/v2/models/m/generate", b"x")[0] == 200
    assert caplog.records == []


def test_what_a_failed_model_owes_is_ended_and_nothing_else(gate):
    """A request that has no answer yet, and a stream of events; another model's goes on."""
    Upstream.gone.clear()
    connections = {}
    for model, call in (("silent", "generate"), ("m", "generate_stream")):
        connections[model] = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
        connections[model].request("POST", f"/v2/models/{model}/{call}", b"{}")
    stream = connections["m"].getresponse()
    assert stream.read(6) == b"data: "
    wait_for(lambda: gate.in_flight == 2)
    gate.fail("it failed: ask again", ["silent"])
    answer = connections["silent"].getresponse()
    assert (answer.status, json.loads(answer.read())) == (503, {"error": "it failed: ask again"})
    assert stream.read(6) == b"data: "
    gate.fail("it failed: ask again", ["m"])
    assert stream.read().endswith(b'data: {"error": "it failed: ask again"}\n\n')
    assert Upstream.gone.wait(10)
    for connection in connections.values():
        connection.close()
    assert send(gate, "POST", "/v2/models/m/generate", b"x")[0] == 200


def test_a_server_that_dies_within_an_answer_ends_it(gate):
    """A stream with an event of its own, anything else by an answer that is not whole: never with another answer."""
    status, text, _ = send(gate, "POST", "/v2/models/broken/generate_stream", b"{}")
    assert (status, text.split(b"\n\n")[1:]) == (200, [b'data: {"error": "tritonserver does not answer"}', b""])
    with pytest.raises((http.client.IncompleteRead, ConnectionError)) as broken:
        send(gate, "POST", "/v2/models/broken/generate", b"{}")
    assert b"error" not in getattr(broken.value, "partial", b"")


@pytest.mark.parametrize(
    ("ready", "error"),
    [(True, "tritonserver does not answer"), (False, "the server is not ready: it loads its models")],
)
def test_an_absent_server_is_a_bad_gateway(ready, error):
    gate = HttpGate("http://127.0.0.1:9", host="127.0.0.1", port=0, max_bytes=LIMIT, is_ready=lambda: ready)
    gate.start()
    try:
        status, body, _ = send(gate, "GET", "/v2")
        assert (status, json.loads(body)) == (502, {"error": error})
    finally:
        gate.close()


def test_a_taken_port_is_named(gate):
    other = HttpGate(gate.upstream, host="127.0.0.1", port=gate.port, max_bytes=LIMIT, is_ready=lambda: True)
    with pytest.raises(ServerError, match=f"127.0.0.1:{gate.port} cannot be listened on: Address already in use\n"):
        other.start()


def test_a_host_that_is_none_is_named():
    other = HttpGate("http://127.0.0.1:9", host="none.invalid", port=0, max_bytes=LIMIT, is_ready=lambda: True)
    with pytest.raises(ServerError, match=r"none\.invalid:0 cannot be listened on: \w"):
        other.start()


def test_who_speaks_tls_is_told_of_once(gate, caplog):
    """By whoever reads what the server says: the client itself understands no answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", gate.port), timeout=10) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"a client speaks TLS to 127.0.0.1:{gate.port}, which is plain HTTP")
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert send(gate, "GET", "/v2")[0] == 200


@pytest.mark.parametrize("sent", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x15\x03\x01\x02\x00\x01\r\n\r\n"])
def test_what_is_not_http_is_refused_without_a_traceback(gate, caplog, sent):
    with socket.create_connection(("127.0.0.1", gate.port), timeout=10) as connection:
        connection.sendall(sent)
        assert b" 400 " in connection.recv(1000)
    assert caplog.records == []


def infer(*shapes):
    return json.dumps({"inputs": [{"name": "x", "shape": shape} for shape in shapes]}).encode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (infer([1, 5], []), None),
        (infer([2**63 - 1]), "has the shape"),
        (infer([-1]), "has the shape"),
        (infer([200, 200]), "has the shape"),
        (infer([True]), "has the shape"),
        (infer(["1"]), "has the shape"),
        (infer([1] * 17), "has the shape"),
        (b"{", "not an inference request"),
        (b"[]", "not an inference request"),
        (b'{"inputs": 5}', "not an inference request"),
        (b"[" * 100_000, "not an inference request"),
    ],
)
def test_shapes(body, problem):
    found = find_problem("/v2/models/m/infer", {}, body, LIMIT)
    assert found is None if problem is None else problem in found
    assert find_problem("/v2/models/m/generate", {}, body, LIMIT) is None


def test_binary_requests_have_their_json_first():
    body = infer([4]) + b"\x00\x01\x02\x03"
    assert find_problem("/v2/models/m/infer", {HEADER_LENGTH: str(len(body) - 4)}, body, LIMIT) is None
    assert find_problem("/v2/models/m/infer", {HEADER_LENGTH: "x"}, body, LIMIT)
