"""`tensorrt_llm`, as `tensorrt_llm_bls` asks it.

Copied into the version folder of `tensorrt_llm_bls`. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from trtseek_wire import ENOUGH, Arrays, Unpacker, is_sibling, name_socket, pack

PIECE = 1 << 16


class ChildError(Exception):
    """What `tensorrt_llm` answers instead; `code`: a name of Triton's error codes."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class Conversation:
    """One request of `tensorrt_llm`, on a connection of its own. `stop` may be called from any thread. `ended`: what
    came last is known to be all."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stopped = self.ended = False

    def ask(self, head: dict[str, Any], arrays: Arrays) -> Iterator[Arrays]:
        """The responses as they come; each is its tensors. Ends early, without an error, once stopped. Raises
        ChildError."""
        try:
            with self._socket:
                self._connect()
                self._socket.sendall(pack(head, arrays))
                yield from self._read()
        except OSError as error:
            if not self._stopped:
                raise ChildError(
                    f"{self.model} cannot be reached ({error}); a process that died is loaded again: ask again",
                    "UNAVAILABLE",
                ) from None

    def finish(self) -> None:
        """As `stop`, of a request whose answer is complete: it is not one that was given up."""
        with contextlib.suppress(OSError):
            self._socket.sendall(pack({ENOUGH: True}))
        self.stop()

    def stop(self) -> None:
        """Has the request end soon: the other side sees that nothing comes from here any more, and what it then still
        has to say is read."""
        self._stopped = True
        with contextlib.suppress(OSError):  # not open yet, or closed
            self._socket.shutdown(socket.SHUT_WR)

    def _connect(self) -> None:
        self._socket.connect(name_socket(self.model))
        if not is_sibling(self._socket):
            raise OSError("another process listens in its place")
        if self._stopped:
            raise OSError("stopped")

    def _read(self) -> Iterator[Arrays]:
        unpacker, failure = Unpacker(), None
        while True:
            piece = self._socket.recv(PIECE)
            if not piece:
                raise OSError("it closed the connection")
            for head, arrays in unpacker.feed(piece):
                self.ended = bool(head["final"])
                if arrays:
                    yield arrays
                if "error" in head:
                    failure = ChildError(head["error"], head["code"])
                if head["final"]:
                    if failure is not None:
                        raise failure
                    return
