"""How `tensorrt_llm_bls` sends its answers, over stand-ins for Triton's module and for `tensorrt_llm`."""

import importlib.util
import json
import sys
import threading
import time
import types

import numpy as np
import pytest

from pipeline.triton import MODEL_REPO
from tests.triton.test_models import ErrorText, Request, Response, Sender, Tensor, strings

FINAL = 1


class Narrow(Sender):
    """As Triton's (24.10) over shared memory that has no room for some responses: it says so, and where that was the
    one with the final flag, takes nothing more. `refuses` is asked for each."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses, self.closed, self.done = refuses, False, threading.Event()

    def send(self, response=None, flags=0):
        assert not self.closed, "Unable to send response. Response sender has been closed."
        self.closed = bool(flags & FINAL)
        try:
            if response is not None and response.error is None and self.refuses(response.outputs):
                raise RuntimeError("Failed to increase the shared memory pool")
            super().send(response, flags)
        finally:
            if self.closed:
                self.done.set()

    def is_cancelled(self):
        return False


class Asked(Request):
    def __init__(self, refuses=lambda outputs: False, **arrays):
        arrays.setdefault("text_input", strings([b"a"]))
        super().__init__(**arrays, max_tokens=np.array([[5]] * len(arrays["text_input"]), np.int32))
        self.sender = Narrow(refuses)

    def request_id(self):
        return "7"

    def timeout(self):
        return 0


def respond(sequence=0, **others):
    """A response of `tensorrt_llm`."""
    return {
        "output_ids": np.array([[[5, 6]]], np.int32),
        "sequence_length": np.array([[2]], np.int32),
        "sequence_index": np.array([[sequence]], np.int32),
        **others,
    }


@pytest.fixture
def model(llama_path, monkeypatch):
    """`model.answers`: what `tensorrt_llm` is to say to a prompt of so many tokens."""
    triton = types.ModuleType("triton_python_backend_utils")
    triton.Tensor, triton.InferenceResponse, triton.TritonError = Tensor, Response, ErrorText
    triton.Logger = types.SimpleNamespace(log_info=print, log_error=print)
    triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    monkeypatch.syspath_prepend(str(MODEL_REPO))
    for name in ("parameters", "text", "chat", "stream", "answer", "child", "wire"):
        monkeypatch.setitem(sys.modules, f"trtseek_{name}", None)  # so that the one imported here is gone afterwards
        del sys.modules[f"trtseek_{name}"]
    spec = importlib.util.spec_from_file_location("relay_model", MODEL_REPO / "tensorrt_llm_bls" / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()

    class Conversation:
        ended = True

        def __init__(self, name):
            pass

        def ask(self, head, inputs):
            return model.answers(int(inputs["input_lengths"].item()))

    monkeypatch.setattr(module, "Conversation", Conversation)
    flags = {"add_special_tokens": "false", "skip_special_tokens": "true", "accumulate_tokens": "false"}
    parameters = {
        **flags,
        "tokenizer_dir": str(llama_path),
        "tensorrt_llm_model_name": "tensorrt_llm",
        "max_prompt_bytes": "1000",
        "max_streams": "4",
    }
    served = [{"name": name} for name in ("text_input", "max_tokens", "stream")]
    config = {"input": served, "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    model.initialize(
        {
            "model_name": "tensorrt_llm_bls",
            "model_version": "1",
            "model_repository": str(MODEL_REPO / "tensorrt_llm_bls"),
            "model_config": json.dumps(config),
        }
    )
    yield model
    model.finalize()


def ask(model, request):
    """What was sent: of each response whether it has the final flag, and its error or outputs."""
    model.execute([request])
    assert request.sender.done.wait(20), "the request hangs"
    return [
        (bool(flags & FINAL), response and (response.error or response.outputs))
        for response, flags in request.sender.sent
    ]


LOGITS = {"context_logits": np.zeros((1, 100, 1000), np.float32)}


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_without_room_in_shared_memory_is_answered_by_its_error(model, streams):
    """At its end a client waited for ever: the response was to be sent again, or had had the final flag."""
    model.answers = lambda _: iter([respond(**LOGITS)])
    wanted = {"stream": np.array([[streams]]), "return_context_logits": np.array([[True]])}
    ((final, error),) = ask(model, Asked(lambda outputs: "context_logits" in outputs, **wanted))
    assert final
    assert "Failed to increase the shared memory pool" in error


def test_a_response_that_cannot_be_sent_late_is_answered_by_its_error(model):
    """The first sequence's, which was held until the second's came."""
    model.answers = lambda _: iter([respond(0), respond(1)])
    ((final, error),) = ask(model, Asked(lambda outputs: outputs["sequence_index"].item() == 0))
    assert final
    assert "Failed to increase the shared memory pool" in error


def test_only_a_small_response_has_the_final_flag_with_it(model):
    model.answers = lambda _: iter([respond()])
    ((final, outputs),) = ask(model, Asked())
    assert final
    assert "text_output" in outputs
    model.answers = lambda _: iter([respond(**LOGITS)])
    (first, outputs), end = ask(model, Asked(return_context_logits=np.array([[True]])))
    assert not first
    assert "context_logits" in outputs
    assert end == (True, None)


@pytest.mark.parametrize("fails", [False, True])
def test_a_row_does_not_wait_for_another(model, fails):
    """Neither its answer nor its error."""
    go = threading.Event()

    def answer(tokens):
        if tokens > 1:
            assert go.wait(20)
        elif fails:
            raise ValueError("no luck")
        yield respond()

    model.answers = answer
    request = Asked(text_input=strings([b"a"], [b"a long prompt"]))
    model.execute([request])
    end = time.monotonic() + 10
    while not request.sender.sent and time.monotonic() < end:
        time.sleep(0.01)
    assert len(request.sender.sent) == 1, "it waits for the other row"
    go.set()
    assert request.sender.done.wait(20)
    (first, flags), (last, end_flags) = request.sender.sent
    assert (flags, end_flags) == (0, FINAL)
    assert "no luck" in first.error if fails else first.outputs["batch_index"].item() == 0
    assert last.outputs["batch_index"].item() == 1
