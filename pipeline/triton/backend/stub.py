"""The few calls of Triton's Python stub that the backend makes. Its module exists inside a stub only, so it is handed
in; every call but `tensors` is a round trip to Triton's own process, of 40 to 100 microseconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrtseekError
from pipeline.triton.backend.senders import describe_error

if TYPE_CHECKING:
    from pipeline.triton.backend.responses import Arrays


def read_tensors(request: Any) -> Arrays:
    """A request's tensors by name, as copies: their memory is Triton's once `execute` has returned."""
    return {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, Any]:
    """What the protocol carries beside tensors."""
    return dict(json.loads(request.parameters() or "{}"))


class StubSender:
    """Answers a request of Triton's. `module` is triton_python_backend_utils."""

    def __init__(self, module: Any, sender: Any) -> None:
        self.module, self._sender = module, sender
        self._final = module.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def send(self, arrays: Arrays, *, final: bool) -> None:
        # Held until they are sent: Triton 24.10 destroys what the client did not ask for without Python's lock.
        tensors = [self.module.Tensor(name, array) for name, array in arrays.items()]
        self._sender.send(self.module.InferenceResponse(tensors), flags=self._final if final else 0)

    def send_error(self, error: TrtseekError, *, final: bool, row: int | None = None) -> None:
        """With the final flag in the same response: many a client cancels its stream when it sees an error, and Triton
        24.10 keeps a request for ever that is cancelled between its last response and a final flag."""
        text, code = describe_error(error, row)
        failure = self.module.TritonError(text, getattr(self.module.TritonError, code))
        self._sender.send(self.module.InferenceResponse(error=failure), flags=self._final if final else 0)

    def send_final(self) -> None:
        self._sender.send(flags=self._final)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())
