"""The repository for NVIDIA's image, not a byte changed, in the real tritonserver: our backend under the other's name
answers with the interpreter's tokens."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import PackageError
from pipeline.evaluation.forward import read_program
from pipeline.network.spec import NetworkSpec
from pipeline.runtime.errors import ServingError
from pipeline.runtime.generation import generate
from pipeline.runtime.runner import InterpreterRunner
from pipeline.triton.backend.rehearsal import load_rehearsal
from pipeline.triton.client import Answer, Client, ask_all
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.package import Rehearsal, find_package
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer
from tests.triton.tensorrtllm.packages import emit

PROMPTS = [[5, 17, 42, 9], [7, 7, 30, 11, 12, 60, 3], list(range(3, 40))]
NEW = 12
QUIET = {"end_id": -1}  # random weights end an answer at any place


def digest(package: Path) -> dict[str, str]:
    files = [path for path in sorted(package.rglob("*")) if path.is_file()]
    return {str(path.relative_to(package)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def package(converted_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit(tmp_path_factory.mktemp("rehearsal"), converted_llama)


@pytest.fixture(scope="module")
def server(package: Path, converted_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    before = digest(package)
    log = tmp_path_factory.mktemp("log") / "triton.log"
    rehearsal = Rehearsal(checkpoint=converted_llama, mode="exact")
    server = find_package(package).make_server(find_installation(), log=log, rehearsal=rehearsal, grace=1)
    with server:
        server.start(300)
        yield server
    assert digest(package) == before


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.addresses.grpc}") as client:
        yield client


@pytest.fixture(scope="module")
def runner(converted_llama: Path) -> InterpreterRunner:
    checkpoint = CheckpointFolder.open(converted_llama)
    spec = NetworkSpec(dtype="float16", block_size=16, max_seq_len=128)
    return InterpreterRunner(read_program(checkpoint, checkpoint.architecture, spec), mode="exact")


def continue_alone(runner: InterpreterRunner, prompt: list[int]) -> list[int]:
    """Greedy tokens of the interpreter, without server or scheduler."""
    return generate(runner, [prompt], max_new_tokens=NEW, block_size=16, eos_token_ids=())[0]


@pytest.fixture(scope="module")
def tokenizer(llama_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama_path)


@pytest.mark.parametrize("stream", [False, True])
def test_tensorrt_llm_answers_with_the_interpreters_tokens(
    client: Client, runner: InterpreterRunner, stream: bool
) -> None:
    for prompt in PROMPTS:
        answer = client.ask(Query(input_ids=prompt, options={"max_tokens": NEW, **QUIET}, stream=stream), timeout=120)
        assert answer.output_ids == continue_alone(runner, prompt)
        assert (answer.num_input_tokens, answer.num_output_tokens) == (len(prompt), NEW)


def test_the_text_path_asks_through_triton(server: TritonServer, tokenizer: Any, runner: InterpreterRunner) -> None:
    """Several at a time: each process of tensorrt_llm_bls has one."""
    texts = ["def f(", "a b c", "once upon a time, "]
    queries = [Query(text=text, options={"max_tokens": NEW, **QUIET}) for text in texts]
    answers = list(ask_all(queries * 3, url=f"127.0.0.1:{server.addresses.grpc}", concurrency=4, timeout=120))
    expected = []
    for text in texts:
        prompt = tokenizer.encode(text)
        whole = tokenizer.decode([*prompt, *continue_alone(runner, prompt)], skip_special_tokens=True)
        expected.append(whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :])
    assert [answer.text if isinstance(answer, Answer) else answer for answer in answers] == expected * 3


def test_a_stop_string_ends_the_answer(client: Client) -> None:
    text = "once upon a time, "
    whole = client.ask(Query(text=text, options={"max_tokens": 40, **QUIET}), timeout=120)
    stop = whole.text[10:14]
    cut = client.ask(Query(text=text, options={"max_tokens": 40, **QUIET}, stop=[stop]), timeout=120)
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_what_it_refuses_is_said_to_the_client(client: Client) -> None:
    with pytest.raises(ServingError, match="max_tokens"):
        client.ask(Query(text="hello", options={"max_tokens": 0}), timeout=60)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_misspelt_input_is_refused(server: TritonServer, model: str) -> None:
    """An ensemble of Triton's hands what it makes of it to its steps."""
    body = json.dumps({"text_input": "hello", "max_tokens": 2, "temprature": 0.5}).encode()
    url = f"http://127.0.0.1:{server.addresses.http}/v2/models/{model}/generate"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, body, timeout=60)
    with caught.value as error:
        assert "temprature: is neither a" in json.loads(error.read())["error"]


def test_ids_of_a_text(client: Client, tokenizer: Any, runner: InterpreterRunner) -> None:
    query = Query(text="a b c", options={"max_tokens": NEW, **QUIET}, ids=True)
    expected = continue_alone(runner, tokenizer.encode("a b c"))
    assert client.ask(query, timeout=60).output_ids == expected


def test_a_cancelled_text_frees_its_blocks(server: TritonServer, client: Client) -> None:
    class EnoughError(Exception):
        pass

    def leave(text: str) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        client.ask(Query(text="a b c", options={"max_tokens": 100, **QUIET}), on_text=leave, timeout=60)
    end = time.monotonic() + 30
    while _used_blocks(server) and time.monotonic() < end:
        time.sleep(0.1)
    assert _used_blocks(server) == 0


def _used_blocks(server: TritonServer) -> float:
    (line,) = [line for line in server.control.metrics().splitlines() if "block_metrics" in line and '"used"' in line]
    return float(line.rpartition(" ")[2])


def test_without_the_word_it_is_not_served_here(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"launch\.sh there, or rehearse it"):
        find_package(package).make_server(find_installation(), log=tmp_path / "log")


def test_outside_a_rehearsal_it_says_what_it_is(package: Path) -> None:
    with pytest.raises(PackageError, match="backend tensorrtllm is NVIDIA's"):
        load_rehearsal({"gpt_model_path": str(package)})
