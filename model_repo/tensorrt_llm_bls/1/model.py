"""Triton model `tensorrt_llm_bls`, the text path for clients: tokenizes, has `tensorrt_llm` generate, and turns its
tokens into text as they come. Flavour trtseek has it a second time, under the name and tensors of `ensemble`.

An instance serves `max_streams` requests at a time: each has a thread, which mostly waits. A client that goes away, or
cancels, is noticed by one more thread, which then has `tensorrt_llm` stop: Triton's own ensembles cannot do that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import triton_python_backend_utils as pb_utils
from trtseek_answer import Answer, Arrays
from trtseek_chat import SERVED, Prompt, build_inputs, read_prompts, rename_fields
from trtseek_child import ChildError, Conversation
from trtseek_parameters import ParameterError, check_parameters
from trtseek_text import (
    DRAINING,
    RequestError,
    Tokenizer,
    is_draining,
    lighten_stub,
    list_inputs,
    poll_seconds,
    read_flag,
    read_parameters,
    resolve_path,
)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Bytes of a response that is sent with the final flag. Where shared memory has no room for one, Triton says so, but
# takes nothing of that request any more after the flag: a larger one goes before, so that its error can be told.
SMALL = 1 << 16


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lighten_stub()
        parameters = read_parameters(args)
        self.tokenizer = Tokenizer(
            resolve_path(args, parameters["tokenizer_dir"]),
            add_special_tokens=read_flag(parameters, "add_special_tokens"),
            skip_special_tokens=read_flag(parameters, "skip_special_tokens"),
        )
        self.inputs = list_inputs(args, SERVED)
        self.name, self.child = args["model_name"], parameters["tensorrt_llm_model_name"]
        self.accumulates = read_flag(parameters, "accumulate_tokens")
        self.max_bytes = int(parameters["max_prompt_bytes"])
        self._streams: dict[Conversation, Call] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.max_streams = int(parameters["max_streams"])
        self._pool = concurrent.futures.ThreadPoolExecutor(self.max_streams, "stream")
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Returns at once; the requests' own senders answer."""
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            call = Call(
                inputs,
                sender=request.get_response_sender(),
                request_id=str(request.request_id() or ""),
                parameters=json.loads(request.parameters() or "{}"),
                timeout=int(request.timeout() or 0),
            )
            if is_draining():
                call.fail(DRAINING, pb_utils.TritonError.UNAVAILABLE, 0)
                call.close()
            else:
                self._pool.submit(self._serve, call)

    def finalize(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, call: Call) -> None:
        """Answers one request, whatever happens: a request without an answer makes its client wait for ever."""
        prompts: list[Prompt] = []
        with answering(call):
            check_parameters(call.parameters, self.name, self.inputs)
            prompts = read_prompts(self.tokenizer, call.inputs, max_bytes=self.max_bytes, parameters=call.parameters)
            call.rows = set(range(len(prompts)))
        threads = [
            threading.Thread(target=self._serve_row, args=(call, row, prompt, len(prompts)))
            for row, prompt in enumerate(prompts[1:], 1)
            if self.max_streams > 1
        ]
        for thread in threads:
            thread.start()
        for row, prompt in enumerate(prompts[: len(prompts) - len(threads)]):
            self._serve_row(call, row, prompt, len(prompts))
        for thread in threads:
            thread.join()
        call.close()

    def _serve_row(self, call: Call, row: int, prompt: Prompt, rows: int) -> None:
        with answering(call, row):
            inputs = build_inputs(self.tokenizer, call.inputs, prompt, row=row, rows=rows)
            self._relay(call, row, Answer(self.tokenizer, prompt, row=row, accumulates=self.accumulates), inputs)

    def _relay(self, call: Call, row: int, answer: Answer, inputs: Arrays) -> None:
        """From `tensorrt_llm` to the client."""
        conversation = Conversation(self.child)
        with self._lock:
            self._streams[conversation] = call
        try:
            head = {
                "request_id": call.request_id,  # by which `tensorrt_llm` is told to stop it
                "parameters": call.parameters,
                "timeout_us": call.timeout,
                "outputs": answer.outputs,
            }
            for arrays in conversation.ask(head, inputs):
                call.send(answer.add(arrays), row, may_be_last=conversation.ended or answer.stopped)
                if answer.stopped:
                    conversation.finish()
        except ChildError as error:
            call.fail(rename_fields(error.message), getattr(pb_utils.TritonError, error.code), row)
            return
        finally:
            with self._lock:
                self._streams.pop(conversation, None)
        call.send(answer.finish(), row, may_be_last=True)

    def _watch(self) -> None:
        count = 0
        while not self._closed.wait(poll_seconds(count)):
            with self._lock:
                streams = list(self._streams.items())
            count = len(streams)
            for conversation, call in streams:
                if call.is_cancelled():
                    conversation.stop()


class Call:
    """One request, and the way to answer it. `rows`: those of its prompts that have something to come."""

    def __init__(
        self, inputs: Arrays, *, sender: Any, request_id: str, parameters: dict[str, Any], timeout: int
    ) -> None:
        self.inputs, self.request_id, self.parameters, self.timeout = inputs, request_id, parameters, timeout
        self.rows: set[int] = set()
        self._sender, self._closed = sender, False
        self._held: tuple[Any, Any] | None = None  # a response, and its tensors
        # Triton crashes when it is asked about a request whose final response it has.
        self._closing = threading.Lock()

    def is_cancelled(self) -> bool:
        with self._closing:
            return not self._closed and bool(self._sender.is_cancelled())

    def close(self) -> None:
        """Sends the final flag, with the last response or error where it was held until now: a client that sees it
        often does not wait for what follows, and of a request that is cancelled between its last response and a final
        flag Triton 24.10 crashes, or keeps it for ever and cannot unload the model."""
        with self._closing:
            self._closed = True
            held, self._held = self._held, None
            if held is not None:
                self._sender.send(held[0], flags=FINAL)
            else:
                self._sender.send(flags=FINAL)

    def send(self, responses: list[Arrays], row: int, *, may_be_last: bool) -> None:
        """What may be the last of all is held until another comes, or the end. Raises where Triton cannot send it."""
        with self._closing:
            if may_be_last:
                self.rows.discard(row)
            for arrays in responses:
                # Kept until they are sent: Triton 24.10 destroys what the client did not ask for without Python's lock.
                tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
                response = pb_utils.InferenceResponse(tensors)
                self._release()
                if may_be_last and not self.rows and measure(arrays) < SMALL:
                    self._held = response, tensors
                else:
                    self._sender.send(response)

    def fail(self, message: str, code: Any, row: int) -> None:
        """An error, as the last of its row. Never raises: what else cannot be sent, the error is to be told."""
        error = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
        with self._closing:
            self.rows.discard(row)
            try:
                self._release()
                if self.rows:
                    self._sender.send(error)
                    return
            except Exception as failure:
                pb_utils.Logger.log_error(f"a response could not be sent: {failure!r}")
            self._held = error, None

    def _release(self) -> None:
        held, self._held = self._held, None  # not sent again where it cannot be
        if held is not None:
            self._sender.send(held[0])


def measure(arrays: Arrays) -> int:
    """Bytes, about."""
    return sum(sum(map(len, array.flat)) if array.dtype == object else array.nbytes for array in arrays.values())


@contextlib.contextmanager
def answering(call: Call, row: int = 0) -> Iterator[None]:
    """What is raised within is the answer."""
    try:
        yield
    except (RequestError, ParameterError) as error:
        call.fail(str(error), pb_utils.TritonError.INVALID_ARG, row)
    except Exception as error:
        pb_utils.Logger.log_error(f"a request failed: {error!r}")
        call.fail(f"the request failed: {error!r}", pb_utils.TritonError.INTERNAL, row)
