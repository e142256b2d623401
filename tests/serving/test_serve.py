"""`trtseek serve` and `trtseek query` as a user runs them: processes of their own, and what they leave behind."""

import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import InferenceServerClient
from tritonclient.http import InferenceServerClient as HttpClient
from tritonclient.utils import InferenceServerException

from tests.serving.asking import Stream, make_inputs, text_of, tokens_of
from tests.serving.memory import list_processes

TRTSEEK = str(Path(sys.executable).with_name("trtseek"))
TRIES = 4  # of ten models' processes that are killed, one took Triton with it
URL = r"gRPC at (\S+), HTTP at (\S+), metrics at (\S+)"


class Serving:
    """A server over a package, on free ports."""

    def __init__(self, package, folder):
        self.log = folder / "serve.log"
        self.process = subprocess.Popen(
            [TRTSEEK, "serve", str(package), "--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--log={self.log}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        match = re.search(URL, line)
        if match is None:
            self.process.kill()
            raise AssertionError((line, self.process.stderr.read()))
        self.grpc, self.http, self.metrics = match.groups()

    def query(self, *arguments, **options):
        return subprocess.run(
            [TRTSEEK, "query", "--url", self.grpc, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )

    def request(self, path, body=None):
        """Status and text."""
        request = urllib.request.Request(f"http://{self.http}{path}", body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def count_aborts(self):
        """How often Triton itself ended because a process of a model was killed inside a lock that they share."""
        return len(re.findall("terminate called after throwing an instance of .*lock_exception", self.log.read_text()))

    def processes(self):
        """Process ids and command lines of the keeper, the server and its stubs: all whose ancestor is `serve`."""
        return list_processes(self.process.pid)

    def end(self):
        output = self.process.communicate(timeout=120)
        return self.process.returncode, output


def shared_memory(pid):
    return list(Path("/dev/shm").glob(f"trtseek_{pid}_*"))


def alive(processes):
    """Those that still run: a process id may have been given to another command meanwhile."""
    found = {}
    for pid, command in processes.items():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text == command != "":
            found[pid] = command
    return found


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def package(served):
    return served.repository.path.parent


@pytest.fixture(scope="module")
def files(package):
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def serving(package, files, tmp_path_factory):
    serving = Serving(package, tmp_path_factory.mktemp("serving"))
    yield serving
    if serving.process.poll() is None:
        serving.process.kill()
        serving.end()


def test_it_listens_on_loopback_only(serving):
    assert {address.rpartition(":")[0] for address in (serving.grpc, serving.http, serving.metrics)} == {"127.0.0.1"}
    port = int(serving.grpc.rpartition(":")[2])
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1].split(":") for table in tables for line in table if line.split()[3] == "0A"]
    hosts = {host for host, number in listening if int(number, 16) == port}
    assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, by itself or in IPv6
    assert hosts


def test_query_streams_text(serving, served):
    whole = serving.query("hello", "--max-tokens=12", "--no-stream")
    assert whole.returncode == 0, whole.stderr
    assert serving.query("hello", "--max-tokens=12").stdout == whole.stdout
    assert serving.query("-", "--max-tokens=12", input="hello").stdout == whole.stdout


def test_query_token_ids_and_json(serving, served):
    (ids,) = served.generate([[5, 6, 7]], 6)
    answer = serving.query("--input-ids=5,6,7", "--max-tokens=6")
    got = [int(token) for token in answer.stdout.split(",")]
    assert got == ids[: len(got)]
    document = json.loads(serving.query("hello wor", "--max-tokens=3", "--json").stdout)
    assert document["num_output_tokens"] == len(document["output_ids"]) == 3
    assert 0 < document["time_to_first"] <= document["seconds"]


def test_query_a_file(serving, tmp_path):
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo\nthree\n")
    answers = serving.query("--file", str(plain), "--max-tokens=4", "--concurrency=3", "--json")
    lines = [json.loads(line) for line in answers.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    alone = [json.loads(serving.query(text, "--max-tokens=4", "--json").stdout)["text"] for text in ("one", "two")]
    assert [line["text"] for line in lines[:2]] == alone
    mixed = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "one", "max_tokens": 4},
        {"prompt": "x", "top_k": -5},
        {"messages": [{"role": "user", "content": "a"}]},
    ]
    mixed.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    answers = serving.query("--file", str(mixed), "--max-tokens=2", "--json")
    lines = [json.loads(line) for line in answers.stdout.splitlines()]
    assert lines[0]["text"] == alone[0]
    assert "top_k is -5" in lines[1]["error"]
    assert lines[2]["num_output_tokens"] <= 2
    assert answers.returncode == 10


def test_query_errors(serving):
    refused = serving.query("hello", "--max-tokens=100000")
    assert refused.returncode == 10
    assert "max_tokens is 100000" in refused.stderr
    absent = subprocess.run(
        [TRTSEEK, "query", "x", "--url=127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert absent.returncode == 11
    assert "no server answers at 127.0.0.1:9" in absent.stderr
    assert serving.query().returncode == 2
    assert serving.query("x", "--input-ids=1").returncode == 2


def test_http_requests_are_bounded(serving):
    path = "/v2/models/tensorrt_llm_bls/generate"
    status, text = serving.request(path, json.dumps({"text_input": "x" * (17 << 20), "max_tokens": 1}).encode())
    assert (status, "a request may have 16777216 bytes" in text) == (413, True)
    huge = {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [2**63 - 1], "data": [1]}]}
    status, text = serving.request("/v2/models/tensorrt_llm/infer", json.dumps(huge).encode())
    assert (status, "shape" in text) == (400, True)
    assert serving.request("/v2/repository/index", b"{}")[0] == 403
    status, text = serving.request(path, json.dumps({"text_input": "hello", "max_tokens": 2}).encode())
    assert status == 200
    assert json.loads(text)["text_output"].startswith("hello")


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls", "ensemble"])
def test_grpc_requests_are_bounded_too(serving, model):
    """What is within the limit is the model's to judge; what is over it comes no further than the door."""
    for nbytes, expected in ((15 << 20, "prompt of 3932160|holds 15728640 bytes"), (17 << 20, r"vs\. 16777216\)")):
        large = tokens_of([5] * (nbytes // 4), 1) if model == "tensorrt_llm" else text_of("x" * nbytes, 1)
        replies = queue.SimpleQueue()
        with InferenceServerClient(serving.grpc) as client:
            client.start_stream(lambda result, error, replies=replies: replies.put(error))
            client.async_stream_infer(model, make_inputs(large))
            error = replies.get(timeout=60)
        assert re.search(expected, error.message())
        assert (error.status() == "StatusCode.RESOURCE_EXHAUSTED") is (nbytes > 16 << 20)
    assert serving.query("hello", "--max-tokens=2").returncode == 0


@pytest.mark.parametrize("nbytes", [15 << 20, 17 << 20])
def test_one_limit_holds_over_both_protocols(serving, nbytes):
    """Of a model that both ask in the same way."""
    refusals = []
    for module, address in ((tritonclient.grpc, serving.grpc), (tritonclient.http, serving.http)):
        query = module.InferInput("QUERY", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([[b"x" * nbytes]], np.object_))
        length = module.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
        length.set_data_from_numpy(np.array([[1]], np.int32))
        with module.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as caught:
            client.infer("preprocessing", [query, length])
        refusals.append((caught.value.status().removeprefix("StatusCode."), caught.value.message()))
    (grpc_status, grpc_text), (http_status, http_text) = refusals
    if nbytes < 16 << 20:
        assert grpc_text == http_text == f"QUERY: holds {nbytes} bytes, and at most 32768 are served"
        assert (grpc_status, http_status) == ("INVALID_ARGUMENT", "400")
    else:
        assert (grpc_status, http_status) == ("RESOURCE_EXHAUSTED", "413")
        assert "16777216" in grpc_text and "16777216" in http_text


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_model_whose_process_dies_is_loaded_again(serving, model):
    before = serving.query("hello", "--max-tokens=8").stdout
    for _ in range(TRIES):
        aborts = serving.count_aborts()
        (stub,) = [pid for pid, command in serving.processes().items() if f"/{model}/1/model.py" in command]
        stream = Stream(serving.grpc, model)
        os.kill(stub, signal.SIGKILL)
        assert wait_for(lambda each=stream: each.errors), "Triton never answers what the process owes"
        stream.client.close()
        assert wait_for(lambda: serving.request("/v2/health/ready")[0] == 503)
        assert wait_for(lambda: serving.request("/v2/health/ready")[0] == 200, 120)
        assert serving.query("hello", "--max-tokens=8").stdout == before
        if serving.count_aborts() == aborts:
            break
    assert serving.count_aborts() == aborts
    assert stream.errors[0].message() == f"{model} failed, and is loaded again: ask again"
    status, _ = serving.request("/v2/models/ensemble/generate", b'{"text_input": "hello", "max_tokens": 2}')
    assert status == 200


@pytest.mark.slow
def test_a_server_that_dies_is_started_again(serving):
    before = serving.query("hello", "--max-tokens=8").stdout
    (server,) = [pid for pid, command in serving.processes().items() if "bin/tritonserver " in command]
    os.kill(server, signal.SIGKILL)
    assert wait_for(lambda: serving.request("/v2/health/ready")[0] == 503)
    assert wait_for(lambda: serving.request("/v2/health/ready")[0] == 200, 120)
    assert serving.query("hello", "--max-tokens=8").stdout == before


class Sender(threading.Thread):
    """Sends one request after another on a gRPC connection that it keeps, until that breaks."""

    def __init__(self, address, model, tensors):
        super().__init__(daemon=True)
        self.client, self.model, self.inputs = InferenceServerClient(address), model, make_inputs(tensors)
        self.ended, self.refused, self.others, self.begun = 0, 0, [], threading.Event()
        self.start()

    def run(self):
        replies = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: replies.put((result, error)))
        while not self.others:
            answered, final = 0, False
            try:
                self.client.async_stream_infer(self.model, self.inputs, enable_empty_final_response=True)
                while not final:
                    result, error = replies.get(timeout=60)
                    if error is not None:
                        break
                    answered += 1
                    self.begun.set()
                    final = result.get_response().parameters["triton_final_response"].bool_param
            except InferenceServerException as broken:
                error = broken
            if final:
                self.ended += 1
                assert not self.refused  # once draining has begun, nothing is taken
            elif answered == 0 and error.message() == "the server is shutting down":
                self.refused += 1
                time.sleep(0.02)
            else:
                self.others.append((answered, error.message()))


class Watcher(threading.Thread):
    """Asks until nobody answers whether server and models are ready, as a load balancer does."""

    def __init__(self, make_client, address):
        super().__init__(daemon=True)
        self.make_client, self.address = make_client, address
        self.seen, self.begun = [], threading.Event()
        self.start()

    def run(self):
        client = self.make_client(self.address)
        with contextlib.suppress(InferenceServerException, OSError):
            while True:
                models = [client.is_model_ready(model) for model in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble")]
                self.seen.append((time.monotonic(), [client.is_server_ready(), *models]))
                self.begun.set()
                time.sleep(0.05)
        client.close()


def test_sigterm_lets_requests_end_refuses_new_ones_and_leaves_nothing(serving, package, files):
    processes = serving.processes()
    assert any("keeper" in command for command in processes.values())
    text = text_of("hello", 240, stream=[[True]])
    asked = {"tensorrt_llm": tokens_of([5], 240, streaming=[[True]]), "tensorrt_llm_bls": text, "ensemble": text}
    senders = [Sender(serving.grpc, model, tensors) for model, tensors in asked.items()]
    watchers = [Watcher(InferenceServerClient, serving.grpc), Watcher(HttpClient, serving.http)]
    assert all(each.begun.wait(120) for each in (*senders, *watchers))
    told = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    code, (_, errors) = serving.end()
    assert code == 0, errors
    assert "still in flight" not in errors
    assert re.search(r"^starting Triton on .*: its 8 processes may need \S+ MB of memory, and \S+ GB are free", errors)
    assert wait_for(lambda: not alive(processes), 10), alive(processes)
    assert shared_memory(serving.process.pid) == []
    assert {path.relative_to(package): path.read_bytes() for path in package.rglob("*") if path.is_file()} == files
    for watcher in watchers:
        watcher.join(60)
        assert all(all(ready) for when, ready in watcher.seen if when < told)
        # The gate looks twice a second, a busy machine's less often; what it says then is not taken back.
        ready = [any(ready) for when, ready in watcher.seen if when > told]
        first = next((when for when, ready in watcher.seen if when > told and not any(ready)), math.inf)
        assert first < told + 10 and ready == sorted(ready, reverse=True), watcher.address
    for sender in senders:
        sender.join(60)
        assert sender.refused, sender.model
        assert [answered for answered, _ in sender.others] == [0]  # what broke at the end was no answer


@pytest.mark.slow
def test_nothing_is_left_of_a_server_whose_owner_was_killed(package, tmp_path):
    serving = Serving(package, tmp_path)
    processes = serving.processes()
    assert shared_memory(serving.process.pid)
    serving.process.kill()
    serving.end()
    del processes[serving.process.pid]
    assert wait_for(lambda: not alive(processes)), alive(processes)
    assert wait_for(lambda: shared_memory(serving.process.pid) == [], 10)


@pytest.mark.slow
def test_check_loads_asks_and_ends(package, tmp_path):
    result = subprocess.run(
        [TRTSEEK, "serve", str(package), "--check", f"--log={tmp_path / 'log'}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"models loaded in \S+ s, a request answered in \S+ s", result.stdout)
