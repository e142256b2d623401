"""The few calls of Triton's Python stub that the backend makes. Its module exists inside a stub only, so it is handed
in; every call but `tensors` is a round trip to Triton's own process, of 40 to 100 microseconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import TrtseekError
from pipeline.runtime import errors

if TYPE_CHECKING:
    from pipeline.triton.backend.responses import Arrays

# Error type -> code of TritonError, which becomes the gRPC status; INTERNAL for all others.
CODES: tuple[tuple[type[TrtseekError], str], ...] = (
    (errors.RequestError, "INVALID_ARG"),
    (errors.QueueFullError, "UNAVAILABLE"),
    (errors.QueueTimeoutError, "UNAVAILABLE"),
    (errors.ShutdownError, "UNAVAILABLE"),
)


class Stub:
    """`module` is triton_python_backend_utils."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._final = module.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def read(self, request: Any) -> Arrays:
        """A request's tensors by name, as copies: their memory is Triton's once `execute` has returned."""
        return {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}

    def read_parameters(self, request: Any) -> dict[str, Any]:
        """What the protocol carries beside tensors."""
        return dict(json.loads(request.parameters() or "{}"))

    def send(self, sender: Any, arrays: Arrays, *, final: bool) -> None:
        tensors = [self.module.Tensor(name, array) for name, array in arrays.items()]
        sender.send(self.module.InferenceResponse(tensors), flags=self._final if final else 0)

    def send_error(
        self, sender: Any, error: TrtseekError, *, final: bool, row: int | None = None, as_tensor: bool = False
    ) -> None:
        """`row`: which one of a batch it is about. `final`: nothing follows, which is told in the same response: many a
        client cancels its stream when it sees an error, and Triton 24.10 keeps a request for ever that is cancelled
        between its last response and a final flag.

        as_tensor: for a model that called this one. The Python backend of Triton 24.10 hands on an error response of a
        decoupled model without the id of the call (SaveToSharedMemory in its infer_response.cc): the caller never sees
        it unless it is the first response, and then cannot be unloaded any more.
        """
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        text = text if row is None else f"row {row}: {text}"
        code = next((code for kind, code in CODES if isinstance(error, kind)), "INTERNAL")
        if as_tensor:
            document = json.dumps({"code": code, "message": text}).encode()
            self.send(sender, {"error": np.array([[document]], np.object_)}, final=final)
        else:
            failure = self.module.TritonError(text, getattr(self.module.TritonError, code))
            sender.send(self.module.InferenceResponse(error=failure), flags=self._final if final else 0)

    def send_final(self, sender: Any) -> None:
        sender.send(flags=self._final)
