"""The few calls of Triton's Python stub that the backend makes. Its module exists inside a stub only, so it is handed
in; every call but `tensors` is a round trip to Triton's own process, of 40 to 100 microseconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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

    def send_error(self, sender: Any, error: TrtseekError, *, row: int | None = None) -> None:
        """`row`: which one of a batch it is about. The final flag goes out by itself."""
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        code = next((code for kind, code in CODES if isinstance(error, kind)), "INTERNAL")
        failure = self.module.TritonError(text if row is None else f"row {row}: {text}", self._code(code))
        sender.send(self.module.InferenceResponse(error=failure))

    def send_final(self, sender: Any) -> None:
        sender.send(flags=self._final)

    def _code(self, name: str) -> Any:
        return getattr(self.module.TritonError, name)
