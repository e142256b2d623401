"""Triton model `tensorrt_llm_bls`, the text path for clients: tokenizes, has `tensorrt_llm` generate, and turns its
tokens into text as they come.

One instance serves all requests: each has a thread, which mostly waits. A client that goes away, or cancels, is noticed
by one more thread, which then has `tensorrt_llm` stop: an ensemble cannot do that.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from trtseek_answer import Answer, Arrays
from trtseek_chat import Prompt, build_inputs, read_prompts, rename_fields
from trtseek_text import RequestError, Tokenizer, end_quickly, read_flag, read_parameters, resolve_path

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Threads that wait for tokens; more requests than that wait for one of them.
MAX_STREAMS = 256
# Asking whether a client has gone is a round trip of 50 microseconds: at most 5 % of a core goes into it.
POLL_S, POLL_PER_STREAM_S = 0.03, 0.001
# How long answers that have ended are kept: see _ask.
KEEP_S = 20.0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_quickly()
        parameters = read_parameters(args)
        self.tokenizer = Tokenizer(
            resolve_path(args, parameters["tokenizer_dir"]),
            add_special_tokens=read_flag(parameters, "add_special_tokens"),
            skip_special_tokens=read_flag(parameters, "skip_special_tokens"),
        )
        self.child = parameters["tensorrt_llm_model_name"]
        self.errors_as_tensor = parameters.get("errors") == "tensor"
        self.accumulates = read_flag(parameters, "accumulate_tokens")
        self.max_bytes = int(parameters["max_prompt_bytes"])
        self._streams: dict[str, Call] = {}
        self._spent: collections.deque[tuple[float, Any]] = collections.deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(MAX_STREAMS, "stream")
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Returns at once; the requests' own senders answer."""
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            call = Call(
                inputs,
                sender=request.get_response_sender(),
                parameters=json.loads(request.parameters() or "{}"),
                timeout=int(request.timeout() or 0),
            )
            self._pool.submit(self._serve, call)

    def finalize(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, call: Call) -> None:
        """Answers one request, whatever happens: a request without an answer makes its client wait for ever."""
        try:
            prompts = read_prompts(self.tokenizer, call.inputs, max_bytes=self.max_bytes)
        except RequestError as error:
            call.fail(str(error), pb_utils.TritonError.INVALID_ARG)
            prompts = []
        rows = [
            threading.Thread(target=self._serve_row, args=(call, row, prompt, len(prompts)))
            for row, prompt in enumerate(prompts[1:], 1)
        ]
        for thread in rows:
            thread.start()
        if prompts:
            self._serve_row(call, 0, prompts[0], len(prompts))
        for thread in rows:
            thread.join()
        call.close()

    def _serve_row(self, call: Call, row: int, prompt: Prompt, rows: int) -> None:
        try:
            inputs = build_inputs(self.tokenizer, call.inputs, prompt, row=row, rows=rows)
            self._relay(call, Answer(self.tokenizer, prompt, row=row, accumulates=self.accumulates), inputs)
        except RequestError as error:
            call.fail(str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            pb_utils.Logger.log_error(f"a request failed: {error!r}")
            call.fail(f"the request failed: {error!r}", pb_utils.TritonError.INTERNAL)

    def _relay(self, call: Call, answer: Answer, inputs: Arrays) -> None:
        """From `tensorrt_llm` to the client."""
        name = uuid.uuid4().hex
        request = pb_utils.InferenceRequest(
            model_name=self.child,
            request_id=name,
            requested_output_names=[*answer.outputs, *(["error"] if self.errors_as_tensor else [])],
            inputs=_tensors(inputs),
            timeout=call.timeout,
            parameters={**call.parameters, **({"errors": "tensor"} if self.errors_as_tensor else {})},
        )
        with self._lock:
            self._streams[name] = call
        stopped, failure = False, None
        try:
            for response in self._ask(request):
                try:
                    if failure is None:
                        self._pass_on(call, answer, response)
                except Exception as error:
                    failure = error
                if not stopped and (answer.stopped or failure):
                    stopped = True  # and what still comes is taken, since Triton waits until it is
                    self._stop(name)
            if failure is not None:
                raise failure
            call.send(answer.finish())
        finally:
            with self._lock:
                self._streams.pop(name, None)

    def _pass_on(self, call: Call, answer: Answer, response: Any) -> None:
        if response.has_error():
            error = response.error()
            call.fail(rename_fields(error.message()), error.code())
            return
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if "error" in arrays:
            document = json.loads(arrays["error"].item())
            call.fail(rename_fields(document["message"]), getattr(pb_utils.TritonError, document["code"]))
        elif arrays:
            call.send(answer.add(arrays))

    def _ask(self, request: Any) -> Iterator[Any]:
        """The responses to a request. Triton's stub lets go of their iterator in a thread of its own, soon after the
        last one, without Python's lock: were that the last reference, the heap would be damaged (24.10,
        Stub::SendCleanupId). So one is kept here until that is surely over."""
        responses = request.exec(decoupled=True)
        try:
            yield from responses
        finally:
            with self._lock:
                self._spent.append((time.monotonic(), responses))

    def _stop(self, name: str) -> None:
        """Ends a request of `tensorrt_llm`: its answer then ends soon."""
        inputs: Arrays = {
            "stop": np.array([[True]]),
            "input_lengths": np.array([[1]], np.int32),
            "request_output_len": np.array([[1]], np.int32),
        }
        request = pb_utils.InferenceRequest(
            model_name=self.child, request_id=name, requested_output_names=["output_ids"], inputs=_tensors(inputs)
        )
        for _ in self._ask(request):
            pass

    def _forget_spent(self) -> None:
        with self._lock:
            old = time.monotonic() - KEEP_S
            spent = [self._spent.popleft()[1] for _ in range(len(self._spent)) if self._spent[0][0] < old]
        spent.clear()

    def _watch(self) -> None:
        count = 0
        while not self._closed.wait(max(POLL_S, POLL_PER_STREAM_S * count)):
            with self._lock:
                streams = list(self._streams.items())
            count = len(streams)
            self._forget_spent()
            for name, call in streams:
                if call.is_cancelled():
                    with self._lock:
                        gone = self._streams.pop(name, None)
                    if gone is not None:
                        self._stop(name)


class Call:
    """One request, and the way to answer it."""

    def __init__(self, inputs: Arrays, *, sender: Any, parameters: dict[str, Any], timeout: int) -> None:
        self.inputs, self.parameters, self.timeout = inputs, parameters, timeout
        self._sender, self._closed = sender, False
        self._error: Any = None
        # Triton crashes when it is asked about a request whose final response it has.
        self._closing = threading.Lock()

    def is_cancelled(self) -> bool:
        with self._closing:
            return not self._closed and bool(self._sender.is_cancelled())

    def close(self) -> None:
        """Sends the final flag; with the last error, as a client that sees one often does not wait for what follows,
        and Triton keeps a request for ever that is cancelled between its last response and a final flag."""
        with self._closing:
            self._closed = True
            if self._error is None:
                self._sender.send(flags=FINAL)
            else:
                self._sender.send(self._error, flags=FINAL)

    def send(self, responses: list[Arrays]) -> None:
        for arrays in responses:
            self._sender.send(pb_utils.InferenceResponse(_tensors(arrays)))

    def fail(self, message: str, code: Any) -> None:
        """Keeps an error until `close`; another row's error before it is sent."""
        with self._closing:
            if self._error is not None:
                self._sender.send(self._error)
            self._error = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _tensors(arrays: dict[str, npt.NDArray[Any]]) -> list[Any]:
    return [pb_utils.Tensor(name, array) for name, array in arrays.items()]
