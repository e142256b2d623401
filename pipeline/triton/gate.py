"""What the doors in front of Triton's own have in common: a thread of their own, and what they know of the server.

Triton 24.10 takes a request of any size, and answers that it is ready while its models' processes are dead, and while
it ends. `http_gate.py` and `grpc_gate.py` pass on the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable

from model_repo.trtseek_text import DRAINING
from pipeline.triton.owed import Owed

CLOSE_S = 5.0


class LostError(Exception):
    """A request in flight is not answered any more; the text says why, to whoever asked."""


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
        # Of each call in flight: what models owe it, and what it is ended with.
        self._calls: dict[asyncio.Timeout, Owed] = {}
        self._reasons: dict[asyncio.Timeout, str] = {}
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Raises ServerError where the port is taken."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._thread.is_alive():
            self._tell(self._stop.set)
            self._thread.join(CLOSE_S + 1)

    def fail(self, reason: str, models: Iterable[str] | None = None, *, silent_since: float = math.inf) -> None:
        """Ends the calls that these models owe an answer, or all: of a model whose process has died Triton never
        answers them. `silent_since`: only those that got no answer since that time of time.monotonic()."""
        if self._thread.is_alive():
            self._tell(self._fail, reason, None if models is None else frozenset(models), silent_since)

    def count_silent(self, models: Iterable[str], since: float) -> int:
        """The calls that `fail` would end."""
        return sum(_is_lost(owed, frozenset(models), since) for owed in list(self._calls.values()))

    @property
    def open(self) -> bool:
        """Whether the server is ready, and takes new requests."""
        return self._is_ready() and not self.draining

    @property
    def absence(self) -> str:
        """What is said when Triton does not answer. Where it is, is nobody's business."""
        if self.draining:
            return DRAINING
        return "tritonserver does not answer" if self._is_ready() else "the server is not ready: it loads its models"

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
        """Sets `_started` once it listens, and returns after `_wait_for_stop`. Raises ServerError where it cannot."""

    async def _wait_for_stop(self) -> None:
        """Then nothing is in flight any more."""
        await self._stop.wait()
        self._fail(DRAINING)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ends already
            self._loop.call_soon_threadsafe(function, *arguments)

    @contextlib.asynccontextmanager
    async def _losable(self, owed: Owed) -> AsyncIterator[None]:
        """A call, and what it is owed, which changes meanwhile. Raises LostError inside it when it is to be ended."""
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._calls[timeout] = owed
                yield
        except TimeoutError:
            if timeout not in self._reasons:
                raise
            raise LostError(self._reasons[timeout]) from None
        finally:
            self._calls.pop(timeout, None)
            self._reasons.pop(timeout, None)

    def _fail(self, reason: str, models: frozenset[str] | None = None, silent_since: float = math.inf) -> None:
        for timeout, owed in self._calls.items():
            if timeout not in self._reasons and _is_lost(owed, models, silent_since):
                self._reasons[timeout] = reason
                timeout.reschedule(self._loop.time())


def _is_lost(owed: Owed, models: frozenset[str] | None, silent_since: float) -> bool:
    return models is None or (not models.isdisjoint(owed.models) and owed.is_silent(silent_since))
