"""The answers of `tensorrt_llm`, on their way from the executor's thread to Triton.

Sending blocks until Triton's own process has taken a response, a tenth of a millisecond. So the executor's thread only
leaves news here, and one thread sends: at once while it keeps up, and under load what several steps left together in
one response. First tokens and ends go before the rest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.errors import TrtseekError
from pipeline.runtime.errors import ServingError
from pipeline.runtime.request import FinishReason
from pipeline.triton.backend.responses import Pending, build_arrays

if TYPE_CHECKING:
    from pipeline.runtime.handle import Callback, Handle, Update
    from pipeline.triton.backend.requests import Wanted
    from pipeline.triton.backend.senders import Sender


LATE = "timeout_ms was over before the answer was complete"


class TimeoutReachedError(ServingError):
    """The request's own time was over. The tokens until then were sent, but of HTTP's `generate` Triton then tells the
    error only."""


class Reply:
    """What one request is answered with: the sequences of all its rows.

    Only the outbox's thread sends. `on_done` is called there, after the last response.
    """

    def __init__(
        self,
        sender: Sender,
        rows: int,
        *,
        request_id: str,
        wanted: Wanted,
        on_done: Callable[[Reply], None],
    ) -> None:
        self.sender, self.request_id, self.wanted, self._on_done = sender, request_id, wanted, on_done
        self.done = False
        self._lock = threading.RLock()
        # Triton crashes when it is asked about a request whose final response it has.
        self._sending = threading.Lock()
        self._handles: list[Handle | None] = [None] * rows
        self._pending: dict[tuple[int, int], Pending] = {}
        self._errors: list[tuple[int, TrtseekError]] = []
        self._open = rows

    def start(self, row: int, submit: Callable[[Callback], Handle], outbox: Outbox) -> None:
        """Submits a row's request, given the callback for its updates; one that is refused fails alone."""

        def on_update(update: Update) -> None:
            outbox.put(self, urgent=self._add(row, update))

        with self._lock:  # no update is taken before the handle is here
            try:
                self._handles[row] = submit(on_update)
            except TrtseekError as error:
                self._open -= 1
                self._errors.append((row, error))
                outbox.put(self, urgent=True)

    def is_cancelled(self) -> bool:
        """Whether the client has gone, which is a question to Triton's process."""
        with self._sending:
            return not self.done and self.sender.is_cancelled()

    def cancel(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.cancel()

    def finish(self) -> None:
        """Whoever asked has all that was wanted: a stop string is in the text."""
        for handle in self._handles:
            if handle is not None:
                handle.finish()

    def send(self) -> None:
        """Sends what has come since the last time. Called by one thread only."""
        with self._sending:
            self._send()
        if self.done:
            self._on_done(self)

    def _send(self) -> None:
        with self._lock:
            taken = [(key, pending.take()) for key, pending in self._pending.items() if pending.has_news]
            errors, self._errors = self._errors, []
            ended = self._open == 0
        for (row, sequence), pending in taken:
            handle = self._handles[row]
            assert handle is not None
            arrays = build_arrays(handle, pending, row=row, sequence=sequence, wanted=self.wanted)
            late = pending.finished and handle.partial.outputs[sequence].finish_reason is FinishReason.TIMED_OUT
            if late:
                errors.append((row, TimeoutReachedError(LATE, hint="a stream has had the tokens until then")))
            is_last = ended and not errors and pending is taken[-1][1]
            self.sender.send(arrays, final=is_last)
            self.done = is_last
        for place, (row, error) in enumerate(errors):
            named = row if len(self._handles) > 1 else None
            is_last = ended and place == len(errors) - 1
            self.sender.send_error(error, final=is_last, row=named)
            self.done = is_last
        if ended and not self.done:
            self.sender.send_final()
            self.done = True

    def _add(self, row: int, update: Update) -> bool:
        """Takes news of a row; whether they are urgent: somebody's first tokens, or an end."""
        with self._lock:
            self._open -= update.is_final
            if update.error is not None:
                self._errors.append((row, update.error))
                return True
            key = (row, update.sequence_index)
            is_first = key not in self._pending
            self._pending.setdefault(key, Pending()).add(update)
            return is_first or update.is_final


class Outbox:
    """Sends replies from a thread of its own, until `close`."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._ready = threading.Condition()
        self._urgent: OrderedDict[Reply, None] = OrderedDict()
        self._waiting: OrderedDict[Reply, None] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, reply: Reply, *, urgent: bool) -> None:
        """Something is to be sent. Never blocks."""
        with self._ready:
            if urgent:
                self._waiting.pop(reply, None)
                self._urgent.setdefault(reply)
            elif reply not in self._urgent:
                self._waiting.setdefault(reply)
            self._ready.notify()

    def close(self) -> None:
        """Sends what is left, then ends the thread."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._urgent or self._waiting):
                    if self._closing:
                        return
                    self._ready.wait()
                reply, _ = (self._urgent or self._waiting).popitem(last=False)
            try:
                reply.send()
            except Exception as error:  # of one reply: Triton refused a response, and the others go on
                reply.cancel()
                self._on_error(error)
