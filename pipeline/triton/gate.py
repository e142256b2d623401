"""What the doors in front of Triton's own have in common: a thread of their own, and what they know of the server.

Triton 24.10 takes a request of any size, and answers that it is ready while its models' processes are dead, and while
it ends. `http_gate.py` and `grpc_gate.py` pass on the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

CLOSE_S = 5.0


class Gate(ABC):
    """Listens at `host`:`port`; a port of 0 is replaced by the one that was free. `upstream` is Triton's own door.

    `max_bytes`: of one request. `is_ready` is asked for every question about readiness. While `draining`, new requests
    are refused; `in_flight`: those that are being answered.
    """

    def __init__(self, upstream: str, *, host: str, port: int, max_bytes: int, is_ready: Callable[[], bool]) -> None:
        self.upstream, self.host, self.port, self.max_bytes = upstream, host, port, max_bytes
        self._is_ready = is_ready
        self.draining = False
        self.in_flight = 0
        self._started = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Raises ServerError where the port is taken."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ends already
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_S + 1)

    @property
    def open(self) -> bool:
        """Whether the server is ready, and takes new requests."""
        return self._is_ready() and not self.draining

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._listen()

    @abstractmethod
    async def _listen(self) -> None:
        """Sets `_started` once it listens, and returns when `_stop` is set. Raises ServerError where it cannot."""
