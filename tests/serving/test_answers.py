"""What the emitted repository answers in a real tritonserver, against generation without server or scheduler."""

import json
import re
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from pipeline.runtime.errors import ServingError
from pipeline.triton.client import Client, ask_all
from pipeline.triton.control import GUARD
from pipeline.triton.query import Query
from tests.serving.asking import make_inputs, text_of, tokens_of

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], list(range(60, 100)), [3], [9, 9, 9, 200, 300]]
QUIET = {"end_id": -1}  # random weights end an answer at any place


@pytest.fixture(scope="module")
def tokenizer(served):
    return AutoTokenizer.from_pretrained(served.source)


@pytest.fixture(scope="module")
def expected(served):
    return served.generate(PROMPTS, 24)


def read_metrics(server):
    """Gauges and counters of the backend: {(family, kind): value}; histogram samples by their name alone, summed."""
    found = {}
    for name, labels, value in re.findall(r"^(nv_trt_llm_\w+)\{(.*)\} (\S+)$", server.control.metrics(), re.M):
        kinds = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in ("model", "version", "le")]
        found[name, kinds[0]] = float(value)
    return found


def wait_for(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_idle(server):
    metrics = read_metrics(server)
    blocks = metrics["nv_trt_llm_kv_cache_block_metrics", "used"]
    return blocks == 0 and metrics["nv_trt_llm_request_metrics", "active"] == 0


# Tokens


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_are_those_of_the_interpreter_alone(client, expected, stream):
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        answer = client.ask(Query(input_ids=prompt, options={"max_tokens": 24, **QUIET}, stream=stream), timeout=60)
        assert answer.output_ids == tokens
        assert (answer.num_input_tokens, answer.num_output_tokens) == (len(prompt), 24)


def test_tokens_are_those_of_transformers(served, client):
    """Greedy in fp32, over the same fp16 weights. A near tie may go either way: the first differing one must be one."""
    reference = AutoModelForCausalLM.from_pretrained(served.source, dtype=torch.float16).float().eval()
    prompt = PROMPTS[0]
    with torch.no_grad():
        made = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        logits = reference(made).logits[0]
    tokens = client.ask(Query(input_ids=prompt, options={"max_tokens": 24, **QUIET}), timeout=60).output_ids
    for place, (ours, theirs) in enumerate(zip(tokens, made[0, len(prompt) :].tolist(), strict=True)):
        if ours != theirs:
            row = logits[len(prompt) + place - 1]
            assert abs(row[ours] - row[theirs]) < 1e-3
            assert place > 8
            break


def test_many_at_once_are_answered_as_alone(url, expected):
    queries = [Query(input_ids=p, options={"max_tokens": 24, **QUIET}) for p in PROMPTS] * 4
    answers = list(ask_all(queries, url=url, concurrency=10, timeout=120))
    assert [answer.output_ids for answer in answers] == expected * 4


def test_a_seed_gives_the_same_tokens_again(client):
    options = {"max_tokens": 16, "temperature": 1.5, "top_k": 50, "seed": 7, **QUIET}
    first, again, other = (
        client.ask(Query(input_ids=PROMPTS[0], options={**options, "seed": seed}), timeout=60).output_ids
        for seed in (7, 7, 8)
    )
    assert first == again != other


def test_log_probs(served, client):
    answer = client.ask(
        Query(input_ids=PROMPTS[0], options={"max_tokens": 6, "return_log_probs": True, **QUIET}), timeout=60
    )
    reference = AutoModelForCausalLM.from_pretrained(served.source, dtype=torch.float16).float().eval()
    with torch.no_grad():
        rows = reference(torch.tensor([PROMPTS[0] + answer.output_ids])).logits[0].log_softmax(-1)
    wanted = [rows[len(PROMPTS[0]) - 1 + i, token].item() for i, token in enumerate(answer.output_ids)]
    assert answer.log_probs == pytest.approx(wanted, abs=2e-3)


def raw(url, model, tensors, *, request_id="", parameters=None, on_response=None):
    """Every response of one request as arrays, over tritonclient itself; `on_response` is called after each."""
    done, responses, errors = threading.Event(), [], []

    def take(result, error):
        if error is not None:
            errors.append(error.message())
            done.set()
            return
        response = result.get_response()
        if response.outputs:
            responses.append({output.name: result.as_numpy(output.name) for output in response.outputs})
        if on_response is not None:
            on_response()
        if response.parameters["triton_final_response"].bool_param:
            done.set()

    client = InferenceServerClient(url)
    client.start_stream(take)
    client.async_stream_infer(
        model, make_inputs(tensors), request_id=request_id, enable_empty_final_response=True, parameters=parameters
    )
    assert done.wait(60)
    client.stop_stream()
    client.close()
    return responses, errors


def test_a_whole_answer_has_the_prompt_first_unless_told(url, expected):
    for exclude in (False, True):
        (response,), _ = raw(url, "tensorrt_llm", tokens_of(PROMPTS[0], 4, exclude_input_in_output=[[exclude]]))
        before = [] if exclude else PROMPTS[0]
        assert response["output_ids"].tolist() == [[before + expected[0][:4]]]
        assert response["sequence_length"].tolist() == [[len(before) + 4]]


def test_only_what_was_asked_for_is_sent(url):
    (plain,), _ = raw(url, "tensorrt_llm", tokens_of([5], 2))
    assert set(plain) == {"output_ids", "sequence_length", "batch_index", "sequence_index"}
    flags = {
        f"return_{name}": [[True]]
        for name in ("log_probs", "context_logits", "generation_logits", "perf_metrics", "num_input_tokens")
    }
    (full,), _ = raw(url, "tensorrt_llm", tokens_of([5, 6, 7], 2, **flags))
    assert full["context_logits"].shape == (1, 3, 512)
    assert full["generation_logits"].shape == (1, 1, 2, 512)
    assert full["generation_logits"][0, 0].argmax(-1).tolist() == full["output_ids"][0, 0, 3:].tolist()
    assert full["output_log_probs"].shape == (1, 1, 2)
    assert full["cum_log_probs"][0, 0] == pytest.approx(full["output_log_probs"].sum(), abs=1e-5)
    assert full["num_input_tokens"].tolist() == [[3]]
    assert 0 < full["first_token_time_ns"].item() <= full["last_token_time_ns"].item()
    assert full["kv_cache_alloc_total_blocks"].item() >= 1


def test_a_batch_is_answered_row_by_row(url, expected):
    tensors = {
        "input_ids": np.array([PROMPTS[1] + [0] * 3, PROMPTS[0]], np.int32),
        "input_lengths": np.array([[2], [5]], np.int32),
        "request_output_len": np.array([[4], [6]], np.int32),
        "exclude_input_in_output": np.array([[True], [True]]),
    }
    responses, _ = raw(url, "tensorrt_llm", tensors)
    by_row = {response["batch_index"].item(): response["output_ids"][0, 0].tolist() for response in responses}
    assert by_row == {0: expected[1][:4], 1: expected[0][:6]}


def test_several_sequences(url, expected):
    responses, _ = raw(
        url,
        "tensorrt_llm",
        tokens_of(PROMPTS[0], 4, num_return_sequences=np.array([[2]], np.int32), exclude_input_in_output=[[True]]),
    )
    assert sorted(response["sequence_index"].item() for response in responses) == [0, 1]
    assert all(response["output_ids"][0, 0].tolist() == expected[0][:4] for response in responses)  # greedy, both


# Text


@pytest.mark.parametrize("stream", [True, False])
def test_text_is_the_decoded_tokens(served, client, tokenizer, stream):
    text = "def f(x): naïve 你好"
    (ids,) = served.generate([tokenizer.encode(text)], 20)
    answer = client.ask(Query(text=text, options={"max_tokens": 20, **QUIET}, stream=stream), timeout=60)
    assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert answer.num_output_tokens == 20
    assert answer.output_ids is None
    again = client.ask(Query(text=text, options={"max_tokens": 20, **QUIET}, stream=stream, ids=True), timeout=60)
    assert (again.output_ids, again.text) == (ids, answer.text)


def test_a_chat_goes_through_the_template(served, client, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (ids,) = served.generate([prompt], 8)
    answer = client.ask(Query(messages=messages, options={"max_tokens": 8, **QUIET}), timeout=60)
    assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert answer.num_input_tokens == len(prompt)


def test_a_stop_string_ends_an_answer(server, client):
    whole = client.ask(Query(text="hello", options={"max_tokens": 60, **QUIET}), timeout=60).text
    stop = whole[12:14]
    answer = client.ask(Query(text="hello", options={"max_tokens": 60, **QUIET}, stop=[stop, "never"]), timeout=60)
    assert answer.text == whole[: whole.index(stop)]
    assert wait_for(lambda: is_idle(server))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_a_stop_string_ends_is_complete(server, client, stream):
    """Whatever `tensorrt_llm` has made until it hears of that."""

    def count():
        time.sleep(1)  # metrics are told twice a second
        metrics = read_metrics(server)
        return [metrics["nv_trt_llm_request_events", event] for event in ("completed", "cancelled")]

    options = {"max_tokens": 200, **QUIET}
    whole = client.ask(Query(text="hello", options={**options, "max_tokens": 30}), timeout=60).text
    completed, cancelled = count()
    answer = client.ask(Query(text="hello", options=options, stop=[whole[12:14]], stream=stream, ids=True), timeout=60)
    assert answer.num_output_tokens == len(answer.output_ids or ()) < 200
    assert wait_for(lambda: is_idle(server))
    assert count() == [completed + 1, cancelled]


def test_the_ensemble_answers_too(url, client):
    whole = client.ask(Query(text="hello", options={"max_tokens": 12, **QUIET}), timeout=60).text
    ids = {"return_output_ids": True}
    (response,), _ = raw(url, "ensemble", text_of("hello", 12, exclude_input_in_output=[[True]]), parameters=ids)
    assert response["output_ids"].shape == (1, 1, 12)
    assert response["text_output"].reshape(-1)[0].decode() == whole
    responses, _ = raw(url, "ensemble", text_of("hello", 12, stream=[[True]]))
    assert len(responses) > 1
    assert b"".join(response["text_output"].reshape(-1)[0] for response in responses).decode() == whole


def test_the_ensemble_answers_a_batch_row_by_row(url, client):
    texts = ["hello", "def f(x):"]
    alone = [client.ask(Query(text=text, options={"max_tokens": 6, **QUIET}), timeout=60).text for text in texts]
    rows = {name: np.repeat(array, 2, 0) for name, array in text_of("", 6, return_log_probs=[[True]]).items()}
    rows["text_input"] = np.array([[text.encode()] for text in texts], np.object_)
    responses, _ = raw(url, "ensemble", {**rows, "exclude_input_in_output": np.array([[True], [True]])})
    said = {response["batch_index"].item(): response["text_output"].reshape(-1)[0].decode() for response in responses}
    assert [said[row] for row in range(2)] == alone
    assert all(response["output_log_probs"].shape == (1, 1, 6) for response in responses)


def post(server, path, body, *, headers=None):
    url = f"http://127.0.0.1:{server.addresses.http}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers or {}), timeout=60) as answer:
        return answer.read()


def test_generate_over_http(server, client):
    whole = client.ask(Query(text="hello", options={"max_tokens": 6, **QUIET}), timeout=60).text
    request = {"text_input": "hello", "max_tokens": 6, "end_id": -1, "exclude_input_in_output": True}
    answer = json.loads(post(server, "/v2/models/tensorrt_llm_bls/generate", json.dumps(request).encode()))
    assert answer["text_output"] == whole
    request |= {"stream": True, "priority_class": "P0"}
    events = post(server, "/v2/models/tensorrt_llm_bls/generate_stream", json.dumps(request).encode()).decode()
    texts = [json.loads(line.removeprefix("data: "))["text_output"] for line in events.splitlines() if line]
    assert "".join(texts) == whole


# What is wrong or late


def test_what_is_late_is_said_truly_where_nothing_was_sent(server):
    asked = {"text_input": "hello", "max_tokens": 200, "end_id": -1, "timeout_ms": 30}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/models/tensorrt_llm_bls/generate", json.dumps(asked).encode())
    with caught.value as error:
        assert json.loads(error.read())["error"].startswith("timeout_ms was over before the answer was complete (a str")


def test_a_request_that_takes_too_long_is_told_so(url):
    responses, errors = raw(
        url, "tensorrt_llm", tokens_of([5], 240, streaming=[[True]]), parameters={"timeout_ms": "60"}
    )
    assert errors == ["timeout_ms was over before the answer was complete (a stream has had the tokens until then)"]
    assert sum(response["output_ids"].shape[2] for response in responses) < 240


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Query(text="x", options={"max_tokens": 100_000}), "max_tokens is 100000, after a prompt of"),
        (Query(text="x", options={"max_tokens": 0}), "max_tokens is 0"),
        (Query(text="x", options={"max_tokens": 4, "top_k": -1}), "top_k is -1"),
        (Query(text="x" * 40_000, options={"max_tokens": 4}), "text_input: holds 40000 bytes"),
        (Query(text="x" * 20_000_000, options={"max_tokens": 4}), "text_input: holds 20000000 bytes"),
        (Query(messages=[], options={"max_tokens": 4}), "messages: must be a list"),
        (Query(text="x"), "max_tokens: is missing"),
        (Query(text="x", options={"max_tokens": 4}, parameters={"priority_class": "P9"}), "priority_class is 'P9'"),
        (Query(input_ids=[512], options={"max_tokens": 4}), "input_ids holds the token 512"),
        (Query(input_ids=[1], options={"max_tokens": 4, "temperature": -1.0}), "temperature is -1"),
        (Query(input_ids=[1] * 300, options={"max_tokens": 4}), "request_output_len is 4, after a prompt of 300"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused_by_the_name_of_its_tensor(client, query, message):
    with pytest.raises(ServingError) as caught:
        client.ask(query, timeout=60)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"beam_width": np.array([[2]], np.int32)}, "beam_width is 2"),
        ({"lora_task_id": np.array([[1]], np.uint64)}, "lora_task_id is for LoRA, which is not served"),
        ({"stop_words_list": np.array([[[1, 2], [5, -1]]], np.int32)}, "stop_words_list ends its words at [5]"),
        ({"input_lengths": np.array([[9]], np.int32)}, "input_lengths is 9, and input_ids has 3 columns"),
        ({"stop": np.array([[True]])}, "stop needs the id of the request"),
    ],
)
def test_bad_tensors(url, others, message):
    responses, (error,) = raw(url, "tensorrt_llm", {**tokens_of([5, 6, 7], 2), **others})
    assert responses == []
    assert error.startswith(message)


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls", "ensemble"])
def test_a_misspelt_input_is_refused(server, url, client, model):
    """Triton makes a parameter of it. Its own pass, and so do those that its clients add."""
    asked = text_of("hello", 2) if model != "tensorrt_llm" else tokens_of([5, 6], 2)
    body = {name: array[0].tolist() for name, array in asked.items() if name != "text_input"} | {"temprature": 0.5}
    body |= {"text_input": "hello"} if model != "tensorrt_llm" else {}
    told = f"temprature.* is neither a parameter nor an input of {model} .did you mean temperature"
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, f"/v2/models/{model}/generate", json.dumps(body).encode())
    with caught.value as error:
        assert re.match(told, json.loads(error.read())["error"])
    responses, (error,) = raw(url, model, asked, parameters={"temprature": "0.5"})
    assert responses == [] and re.match(told, error)
    body = {**body, "id": "7", "priority": 0, "timeout": 10**7, "sequence_id": 0, "parameters": {"min_p": "0.1"}}
    del body["temprature"]
    assert json.loads(post(server, f"/v2/models/{model}/generate", json.dumps(body).encode()))["id"] == "7"


@pytest.mark.parametrize("others", [{}, {"end_id": -1}])
@pytest.mark.parametrize("misspelt", ["max_tokens", "text_input"])
def test_a_required_input_that_is_misspelt_is_refused(server, misspelt, others):
    """By name, unless so few inputs are left that Triton, which counts them first, misses one."""
    body = {"text_input": "hello", "max_tokens": 2, **others}
    body[f"{misspelt}x"] = body.pop(misspelt)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/models/ensemble/generate", json.dumps(body).encode())
    with caught.value as error:
        told = json.loads(error.read())["error"]
    assert (f"{misspelt}x: is neither" if others else f"missing required input(s) ['{misspelt}']") in told


def test_an_input_of_another_model_is_refused_with_that_models_name(server):
    body = {"text_input": "hello", "max_tokens": 2, "messages": "[]"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/models/ensemble/generate", json.dumps(body).encode())
    with caught.value as error:
        told = json.loads(error.read())["error"]
    assert told.startswith("messages: is no input of ensemble, but of tensorrt_llm_bls (")
    assert "messages" not in told.partition("inputs: ")[2]


def test_a_bad_row_of_a_batch_is_refused_with_it(url):
    tensors = {
        "input_ids": np.array([[5], [6]], np.int32),
        "input_lengths": np.array([[1], [1]], np.int32),
        "request_output_len": np.array([[2], [100_000]], np.int32),
    }
    responses, (error,) = raw(url, "tensorrt_llm", tensors)
    assert error.startswith("row 1: request_output_len is 100000")
    assert all(response["batch_index"].item() == 0 for response in responses)


def test_messages_that_are_nested_too_deeply_are_refused(server):
    """They were not answered at all, and their client waited for ever."""
    body = json.dumps({"messages": "[" * 10_000, "max_tokens": 2}).encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/models/tensorrt_llm_bls/generate", body)
    with caught.value as error:
        assert "messages: is nested too deeply" in json.loads(error.read())["error"]


@pytest.mark.parametrize(("ids", "problem"), [([[-5, 6]], "token -5 is below 0"), ([[]], None)])
def test_token_ids_that_are_none(url, ids, problem):
    """Through `postprocessing`, which answers a batch together."""
    tokens = InferInput("TOKENS_BATCH", [1, 1, len(ids[0])], "INT32")
    tokens.set_data_from_numpy(np.array([ids], np.int32))
    lengths = InferInput("SEQUENCE_LENGTH", [1, 1], "INT32")
    lengths.set_data_from_numpy(np.array([[len(ids[0])]], np.int32))
    with InferenceServerClient(url) as client:
        if problem is None:
            assert client.infer("postprocessing", [tokens, lengths]).as_numpy("OUTPUT").tolist() == [b""]
        else:
            with pytest.raises(InferenceServerException, match=problem):
                client.infer("postprocessing", [tokens, lengths])


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"max_tokens": "x"}', b"\xff\xfe"])
def test_malformed_http_requests_leave_the_server_alive(server, client, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/models/tensorrt_llm_bls/generate", body)
    caught.value.close()
    assert client.ask(Query(text="a", options={"max_tokens": 1, **QUIET}), timeout=60).num_output_tokens == 1


# The server itself


def test_metrics_have_the_backends_names(server, client):
    shared = list(range(100, 164))
    for last in (1, 2):
        client.ask(Query(input_ids=[*shared, last], options={"max_tokens": 3, **QUIET}), timeout=60)
    metrics = {}
    hits = ("nv_trt_llm_prefix_cache_metrics", "hit_tokens")
    # The second found the first one's; metrics are published now and then.
    assert wait_for(lambda: metrics.update(read_metrics(server)) or metrics[hits] >= 64)
    assert metrics["nv_trt_llm_request_metrics", "max"] == 8
    assert metrics["nv_trt_llm_kv_cache_block_metrics", "tokens_per"] == 16
    assert metrics["nv_trt_llm_kv_cache_block_metrics", "max"] == 128
    assert ("nv_trt_llm_inflight_batcher_metrics", "generation_requests") in metrics
    assert metrics["nv_trt_llm_time_to_first_token_seconds_count", "P1"] > 0
    assert metrics["nv_trt_llm_time_per_output_token_seconds_count", "P1"] > 0
    assert metrics["nv_trt_llm_queue_time_seconds_count", "P1"] > 0


def test_loading_models_is_for_who_started_the_server_alone(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v2/repository/index", b"{}")
    assert caught.value.code == 403
    caught.value.close()
    assert json.loads(post(server, "/v2/repository/index", b"{}", headers={GUARD: server.control.key}))


def test_a_client_of_its_own_for_each_thread(url):
    """Connections come and go without a trace."""
    for _ in range(20):
        with Client(url) as client:
            client.ask(Query(text="a", options={"max_tokens": 1, **QUIET}), timeout=60)


def test_a_query_that_takes_too_long_has_failed(client: Client) -> None:
    """The server is well: it answers the next one."""
    with pytest.raises(ServingError, match=r"has not answered in full after 0\.01 s"):
        client.ask(Query(text="hello", options={"max_tokens": 60, **QUIET}), timeout=0.01)
    assert client.ask(Query(text="hello", options={"max_tokens": 2, **QUIET}), timeout=60).num_output_tokens == 2
