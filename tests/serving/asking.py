"""Requests to the emitted models through tritonclient itself. Imports little: a client is a process of its own, too."""

import threading

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

# Of a Stream: tokens that it asks for, and that have come when it is made.
LENGTH, ENOUGH = 240, 5


def make_inputs(tensors):
    kinds = {"i": "INT32", "b": "BOOL", "f": "FP32", "O": "BYTES", "u": "UINT64"}
    inputs = []
    for name, array in tensors.items():
        array = np.asarray(array)
        tensor = InferInput(name, list(array.shape), kinds[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def tokens_of(prompt, max_tokens, **others):
    return {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
        **{name: np.array(value) for name, value in others.items()},
    }


def text_of(text, max_tokens, **others):
    return {
        "text_input": np.array([[text.encode()]], np.object_),
        "max_tokens": np.array([[max_tokens]], np.int32),
        "end_id": np.array([[-1]], np.int32),
        **{name: np.array(value) for name, value in others.items()},
    }


def make_request(model):
    """One whose text shows how many tokens there were: each is an `a`."""
    if model == "tensorrt_llm":
        return tokens_of([5], LENGTH, streaming=[[True]])
    certain = {"embedding_bias_words": np.array([["a"]], np.object_), "embedding_bias_weights": np.float32([[1000]])}
    return text_of("hello", LENGTH, stream=[[True]], **certain)


def count_tokens(arrays):
    if "output_ids" in arrays:
        return arrays["output_ids"].size
    text = arrays["text_output"].reshape(-1)[0]
    assert set(text) <= set(b"a")
    return len(text)


class Stream:
    """A request over gRPC, of which `ENOUGH` tokens have come."""

    def __init__(self, url, model, request_id=""):
        self.client, self.seen, self.errors = InferenceServerClient(url), 0, []
        self.begun, self.ended = threading.Event(), threading.Event()
        self.client.start_stream(self._take)
        self.client.async_stream_infer(
            model, make_inputs(make_request(model)), request_id=request_id, enable_empty_final_response=True
        )
        assert self.begun.wait(60)

    def _take(self, result, error):
        if error is not None:
            self.errors.append(error)
            return
        response = result.get_response()
        if response.outputs:
            self.seen += count_tokens({output.name: result.as_numpy(output.name) for output in response.outputs})
        if self.seen >= ENOUGH:
            self.begun.set()
        if response.parameters["triton_final_response"].bool_param:
            self.ended.set()
