"""The ways by which an answer goes back to who asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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


class Sender(Protocol):
    """Of one request. `final`: nothing follows."""

    def send(self, arrays: Arrays, *, final: bool) -> None: ...

    def send_error(self, error: TrtseekError, *, final: bool, row: int | None = None) -> None:
        """`row`: which one of a batch it is about."""

    def send_final(self) -> None:
        """Ends the answer with nothing more."""

    def is_cancelled(self) -> bool:
        """Whether whoever asked has gone. Not to be asked once the answer has ended."""


def describe_error(error: TrtseekError, row: int | None) -> tuple[str, str]:
    """Message and code."""
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    code = next((code for kind, code in CODES if isinstance(error, kind)), "INTERNAL")
    return text if row is None else f"row {row}: {text}", code
