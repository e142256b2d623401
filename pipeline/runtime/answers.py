"""The requests in an executor, and everything that their handles are told."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pipeline.errors import TrtseekError
from pipeline.runtime.context import Context
from pipeline.runtime.errors import QueueTimeoutError, RequestError, ServingError
from pipeline.runtime.handle import Handle, Update
from pipeline.runtime.request import FinishReason
from pipeline.runtime.scheduler import Scheduler
from pipeline.runtime.sequence import Sequence
from pipeline.runtime.statistics import Statistics

COUNTERS = {FinishReason.CANCELLED: "cancelled_total", FinishReason.TIMED_OUT: "timed_out_total"}


class Answers:
    """`live`: the unfinished sequences of each unfinished request. `on_start` is called when a request first runs,
    `on_close` just before its handle is told of its end."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: Statistics,
        on_start: Callable[[Handle], None],
        on_close: Callable[[Handle], None],
    ) -> None:
        self.scheduler, self._statistics, self._on_start, self._on_close = scheduler, statistics, on_start, on_close
        self.live: dict[Handle, list[Sequence]] = {}
        self.contexts: dict[Handle, Context] = {}
        self._deadlines: list[tuple[float, int, bool, Handle]] = []

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, sequence: Sequence) -> None:
        """Queues the first sequence of a request; if it asks for too much, its handle is told."""
        handle, request = sequence.handle, sequence.request
        self.live[handle] = []
        if request.wants_context:
            self.contexts[handle] = Context(request)
        for limit, until_start in ((request.queue_timeout, True), (request.timeout, False)):
            if limit is not None:
                entry = (sequence.arrival + limit, sequence.order, until_start, handle)
                heapq.heappush(self._deadlines, entry)
        try:
            self.scheduler.add(sequence)
        except RequestError as error:
            self.fail(handle, error)
        else:
            self.live[handle].append(sequence)

    def start(self, sequence: Sequence, now: float) -> None:
        """A sequence got its place in a step."""
        handle: Handle = sequence.handle
        timing = handle.partial.timing
        if timing.first_scheduled is None:
            timing.first_scheduled = now
            self._statistics.observe("queue_time", sequence.request.priority, now - timing.arrival)
            self._statistics.add(prefix_hit_tokens=sequence.cached, prompt_tokens=sequence.prompt_length)
            self._on_start(handle)

    def pause(self, sequence: Sequence) -> None:
        """A sequence lost its place."""
        handle: Handle = sequence.handle
        handle.partial.times_paused += 1
        self._statistics.add(paused_total=1)
        if handle in self.contexts:
            self.contexts[handle].clear()

    def append(self, sequence: Sequence, token: int, log_prob: float | None, now: float) -> None:
        """A token was drawn; negative where every token was excluded."""
        handle: Handle = sequence.handle
        request, output, timing = handle.request, handle.partial.outputs[sequence.index], handle.partial.timing
        if token < 0:
            problem = "leave no token to choose"
            self.fail(handle, RequestError("bad_words, embedding_bias", problem, hint="exclude fewer tokens"))
            return
        if timing.first_token is None:
            timing.first_token = now
            self._statistics.observe("time_to_first_token", request.priority, now - timing.arrival)
        timing.last_token = now
        if token == request.end_id:
            self._leave(sequence)
            self._tell(handle, sequence.index, FinishReason.END_ID, new=0)
            return
        sequence.tokens.append(token)
        sequence.history.add(token)
        output.tokens.append(token)
        if log_prob is not None:
            output.log_probs.append(log_prob)
        if any(sequence.tokens[-len(word) :] == word for word in handle.stop_words):
            reason = FinishReason.STOP_WORDS
        elif len(output.tokens) == request.max_tokens:
            reason = FinishReason.LENGTH
        else:
            if request.streaming:
                self._tell(handle, sequence.index, None, new=1)
            return
        self._leave(sequence)
        self._tell(handle, sequence.index, reason, new=1)

    def end(self, handle: Handle, reason: FinishReason) -> None:
        """Ends what is left of a request, which keeps what it has. Without effect once it is done."""
        for sequence in list(self.live.get(handle, ())):
            self._leave(sequence)
        for index, output in enumerate(handle.partial.outputs):
            if handle in self.live and output.finish_reason is None:
                self._tell(handle, index, reason, new=0)

    def fail(self, handle: Handle, error: TrtseekError) -> None:
        """Ends a request with an error. What it wrote is zeroed before anyone else gets it."""
        for sequence in list(self.live[handle]):
            self._leave(sequence, tainted=True)
        self._close(handle, "failed_total")
        self._deliver(handle, lambda: handle.fail(error))

    def abandon(self, error: TrtseekError) -> None:
        """Ends every request with an error, the blocks being lost anyway."""
        for handle in list(self.live):
            self.live[handle] = []
            self.fail(handle, error)

    def expire(self, now: float) -> None:
        """Ends what has waited or run for too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, until_start, handle = heapq.heappop(self._deadlines)
            if handle not in self.live:
                continue
            if not until_start:
                self.end(handle, FinishReason.TIMED_OUT)
            elif handle.partial.timing.first_scheduled is None:
                allowed = handle.request.queue_timeout
                problem = f"request {handle.request_id} did not start within its queue_timeout of {allowed} s"
                self.fail(handle, QueueTimeoutError(problem, hint="the server is overloaded: try again later"))

    def _leave(self, sequence: Sequence, *, tainted: bool = False) -> None:
        handle: Handle = sequence.handle
        handle.partial.new_blocks += sequence.given
        handle.partial.reused_blocks += sequence.reused
        self.scheduler.remove(sequence, tainted=tainted)
        self.live[handle].remove(sequence)

    def _tell(self, handle: Handle, index: int, reason: FinishReason | None, *, new: int) -> None:
        """An update of one sequence: its newest tokens where the request streams, else all."""
        request, outputs = handle.request, handle.partial.outputs
        output = outputs[index]
        output.finish_reason = reason
        since = len(output.tokens) - new if request.streaming else 0
        is_final = reason is not None and all(other.finish_reason is not None for other in outputs)
        if reason is not None and is_final:
            self._observe_pace(handle)
            self._close(handle, COUNTERS.get(reason, "completed_total"))
        update = Update(
            request=request,
            request_id=handle.request_id,
            sequence_index=index,
            tokens=output.tokens[since:],
            log_probs=output.log_probs[since:] if request.return_log_probs else None,
            finish_reason=reason,
            is_final=is_final,
        )
        self._deliver(handle, lambda: handle.deliver(update))

    def _observe_pace(self, handle: Handle) -> None:
        timing = handle.partial.timing
        longest = max(len(output.tokens) for output in handle.partial.outputs)
        if longest > 1 and timing.first_token is not None and timing.last_token is not None:
            pace = (timing.last_token - timing.first_token) / (longest - 1)
            self._statistics.observe("time_per_token", handle.request.priority, pace)

    def _close(self, handle: Handle, counter: str) -> None:
        del self.live[handle]
        self.contexts.pop(handle, None)
        self._statistics.add(**{counter: 1})
        self._on_close(handle)

    def _deliver(self, handle: Handle, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception as error:  # the callback's own fault: its request ends, the others go on
            handle.on_update = None
            failure = ServingError(f"the callback of request {handle.request_id} raised {error!r}")
            if handle in self.live:
                self.fail(handle, failure)
            else:
                handle.error = handle.error or failure
