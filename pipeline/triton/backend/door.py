"""The socket by which `tensorrt_llm_bls` asks: see model_repo/trtseek_wire.py.

One thread takes what comes in and sees who goes; a request whose connection closes is one whose client has gone.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from model_repo.trtseek_wire import ENOUGH, Arrays, Unpacker, is_sibling, name_socket, pack
from pipeline.errors import PackageError, TrtseekError
from pipeline.triton.backend.senders import describe_error

if TYPE_CHECKING:
    from pipeline.triton.backend.replies import Reply

BIND_S = 10.0  # for a model that is loaded while the one before it is still on its way out
SEND_S = 30.0  # a reader that takes nothing for so long is as good as gone
PIECE = 1 << 16


class DoorSender:
    """Answers on one connection, which is closed when the answer has ended and the other side has gone or hung up."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = self._left = self._broken = False

    def send(self, arrays: Arrays, *, final: bool) -> None:
        self._send({"final": final}, arrays)

    def send_error(self, error: TrtseekError, *, final: bool, row: int | None = None) -> None:
        text, code = describe_error(error, row)
        self._send({"final": final, "error": text, "code": code})

    def send_final(self) -> None:
        self._send({"final": True})

    def is_cancelled(self) -> bool:
        return self._left or self._broken

    def leave(self, *, unanswered: bool) -> None:
        """Nothing more comes from the other side. `unanswered`: nor does an answer go there."""
        with self._lock:
            self._left = True
            if self._ended or unanswered:
                self._connection.close()

    def _send(self, head: dict[str, Any], arrays: Arrays | None = None) -> None:
        try:
            self._connection.sendall(pack(head, arrays))
        except OSError:  # it has gone, which the door's thread sees too, and then closes this end
            self._broken = True
        if head["final"]:
            with self._lock:
                self._ended = True
                if self._left:
                    self._connection.close()


Accept = Callable[[dict[str, Any], Arrays, DoorSender], "Reply | None"]


class Door:
    """`accept` is called with each request; its reply is cancelled when its connection closes."""

    def __init__(self, model: str, accept: Accept) -> None:
        self._accept, self._closed = accept, threading.Event()
        self._listener = _listen(model)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._callers: dict[socket.socket, _Caller] = {}
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for connection in [*self._callers, self._listener]:
            connection.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    self._read(connection)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not is_sibling(connection):
                connection.close()
                return
            connection.settimeout(SEND_S)
            self._callers[connection] = _Caller(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        caller = self._callers[connection]
        try:
            piece = connection.recv(PIECE)
            for head, arrays in caller.unpacker.feed(piece):
                if ENOUGH not in head:
                    caller.reply = self._accept(head, arrays, caller.sender)
                elif caller.reply is not None:
                    caller.reply.finish()
        except (OSError, ValueError, KeyError, TypeError):
            piece = b""
        if not piece:
            self._selector.unregister(connection)
            del self._callers[connection]
            caller.sender.leave(unanswered=caller.reply is None)
            if caller.reply is not None:
                caller.reply.cancel()


class _Caller:
    def __init__(self, connection: socket.socket) -> None:
        self.unpacker, self.sender = Unpacker(), DoorSender(connection)
        self.reply: Reply | None = None


def _listen(model: str) -> socket.socket:
    """Raises PackageError where another process of this server listens already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end = time.monotonic() + BIND_S
    while True:
        try:
            listener.bind(name_socket(model))
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            listener.close()
            raise PackageError(
                f"the socket of {model} is taken: {error.strerror}", hint="a server runs one instance of the model"
            ) from None
        listener.listen(1024)
        return listener
