"""`tensorrt_llm` behind a backend that is not ours, as `tensorrt_llm_bls` asks it: through Triton.

Copied into the version folder of `tensorrt_llm_bls` as trtseek_child.py. One request at a time in each process, of
which there are several: Triton's stub (24.10) can deadlock where several threads of one wait for answers.
"""

from __future__ import annotations

import collections
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

Arrays = dict[str, npt.NDArray[Any]]

# Triton's stub lets go of an answer in a thread of its own, soon after its last response and without Python's lock:
# were that the last reference, the heap would be damaged (24.10, Stub::SendCleanupId). So one is kept until that is
# surely over.
KEEP_S = 20.0
_spent: collections.deque[tuple[float, Any]] = collections.deque()
CODES = ("INVALID_ARG", "UNAVAILABLE", "NOT_FOUND", "ALREADY_EXISTS", "UNSUPPORTED", "CANCELLED")


class ChildError(Exception):
    """What `tensorrt_llm` answers instead; `code`: a name of Triton's error codes."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class Conversation:
    """One request of `tensorrt_llm`. `stop` may be called from any thread: the request is told of it when its next
    tokens come, by the thread that takes them. `ended`: what came last is known to be all, which Triton does not
    tell."""

    ended = False

    def __init__(self, model: str) -> None:
        self.model = model
        self._name = uuid.uuid4().hex  # a request to stop names the one to be stopped
        self._stopped = False

    def ask(self, head: dict[str, Any], arrays: Arrays) -> Iterator[Arrays]:
        """The responses as they come; each is its tensors. Ends early, without an error, once stopped. Raises
        ChildError."""
        request = self._request(arrays, head["outputs"], timeout=head["timeout_us"], parameters=head["parameters"])
        failure, told = None, False
        for response in _ask(request):
            if response.has_error():
                failure = _read_error(response.error())
            elif found := {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}:
                yield found
            if self._stopped and not told:
                told = True  # and what still comes is taken: Triton waits until it is
                self._tell()
        if failure is not None and not self._stopped:
            raise failure

    def stop(self) -> None:
        """Has the request end soon."""
        self._stopped = True

    def finish(self) -> None:
        """As `stop`: TensorRT-LLM has no other way for a request whose answer is complete."""
        self.stop()

    def _tell(self) -> None:
        """TensorRT-LLM's way to cancel: a request of the same name that says stop."""
        inputs: Arrays = {
            "stop": np.array([[True]]),
            "input_lengths": np.array([[1]], np.int32),
            "request_output_len": np.array([[1]], np.int32),
        }
        for _ in _ask(self._request(inputs, ["output_ids"])):
            pass

    def _request(self, arrays: Arrays, outputs: list[str], **options: Any) -> Any:
        return pb_utils.InferenceRequest(
            model_name=self.model,
            request_id=self._name,
            requested_output_names=outputs,
            inputs=[pb_utils.Tensor(name, array) for name, array in arrays.items()],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
            **options,
        )


def _ask(request: Any) -> Iterator[Any]:
    responses = request.exec(decoupled=True)
    try:
        yield from responses
    finally:
        now = time.monotonic()
        while _spent and _spent[0][0] < now - KEEP_S:
            _spent.popleft()
        _spent.append((now, responses))


def _read_error(error: Any) -> ChildError:
    names = {getattr(pb_utils.TritonError, name): name for name in CODES}
    return ChildError(error.message(), names.get(error.code(), "INTERNAL"))
