"""The door to the batcher: requests from any thread, one thread that steps.

    executor = Executor(runner, limits, vocab_size=architecture.vocab_size)
    executor.start()
    for update in executor.submit(Request(input_ids=prompt, max_tokens=64, streaming=True)):
        ...
    executor.shutdown()

Without `start`, `step` is called instead, as tests do.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.errors import TrtseekError
from pipeline.runtime.batcher import Batcher, BatcherSettings
from pipeline.runtime.errors import QueueFullError, ServingError, ShutdownError
from pipeline.runtime.handle import Callback, Handle, Output, Result, Timing
from pipeline.runtime.limits import Limits
from pipeline.runtime.request import FinishReason, Priority, Request, check_request
from pipeline.runtime.sampling import MAX_SEED
from pipeline.runtime.sequence import Sequence as Running
from pipeline.runtime.statistics import Statistics

if TYPE_CHECKING:
    from pipeline.runtime.runner import Runner

IDLE_SECONDS = 1.0
STUCK_SECONDS = 0.005  # until something may have changed, where requests wait and none can run
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings(BatcherSettings):
    """queue_limits: requests of each class that may wait for their first step; None for no limit."""

    queue_limits: dict[Priority, int | None] = field(default_factory=lambda: dict.fromkeys(Priority))


class Executor:
    """`clock`: seconds, never going back."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        *,
        vocab_size: int,
        settings: ExecutorSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.vocab_size, self.settings = limits, vocab_size, settings or ExecutorSettings()
        self.statistics = Statistics()
        self.error: Exception | None = None  # why the loop stopped for good
        self._clock = clock
        self._orders = itertools.count()
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._queued = dict.fromkeys(Priority, 0)
        self._handles: dict[str, list[Handle]] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self.batcher = Batcher(
            runner, limits, self.settings, self.statistics, clock, on_start=self._leave_queue, on_close=self._forget
        )

    def submit(self, request: Request, on_update: Callback | None = None) -> Handle:
        """Queues a request. `on_update` is called with every Update, on the executor's thread: it must return at once.

        Raises RequestError for what cannot be run here, QueueFullError, ShutdownError.
        """
        check_request(request, vocab_size=self.vocab_size, max_seq_len=self.limits.max_seq_len)
        order, arrival = next(self._orders), self._clock()
        seed = request.sampling.seed
        result = Result(
            request_id=request.request_id or f"request-{order}",
            outputs=[Output() for _ in range(request.num_return_sequences)],
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
            timing=Timing(arrival=arrival),
        )
        handle = Handle(request, result, end=self._end, on_update=on_update)
        sequence = Running(request, order=order, arrival=arrival, seed=result.seed, handle=handle)
        self.batcher.scheduler.check_size(sequence)
        if self.settings.reuse_blocks:
            sequence.full_hashes(self.limits.block_size)  # here, on the caller's thread
        with self._lock:
            if self._closing or self.error is not None:
                raise ShutdownError("the executor takes no more requests", hint="another server has to be asked")
            limit = self.settings.queue_limits.get(request.priority)
            if limit is not None and self._queued[request.priority] >= limit:
                self.statistics.add(rejected_total=1)
                problem = f"{limit} requests of class {request.priority.name} wait already"
                raise QueueFullError(problem, hint="try again later")
            self._queued[request.priority] += 1
            self._handles.setdefault(handle.request_id, []).append(handle)
            self._inbox.append(lambda: self.batcher.answers.add(sequence))
            self._lock.notify()
        return handle

    def cancel(self, request_id: str) -> int:
        """Ends the requests of this id within a step (`stop` in TensorRT-LLM's terms); how many there were."""
        with self._lock:
            handles = [handle for handle in self._handles.get(request_id, ()) if not handle.done]
        for handle in handles:
            handle.cancel()
        return len(handles)

    def pin(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Keeps the cached blocks of this beginning until `unpin`; how many of its tokens are cached, 0 also where the
        requests at hand need the room. Call it once a request with that beginning was answered."""
        return self._ask(lambda: self.batcher.pin(tokens, cache_salt))

    def unpin(self, tokens: Sequence[int], cache_salt: str = "") -> None:
        """Without effect on what is not pinned."""
        self._ask(lambda: self.batcher.unpin(tokens, cache_salt))

    @property
    def healthy(self) -> bool:
        """Whether requests can be expected to succeed: the loop lives, and the runner did not fail every last step."""
        alive = self._thread is None or self._thread.is_alive()
        return alive and self.error is None and self.batcher.failures < MAX_FAILURES

    def step(self) -> bool:
        """Takes in what was asked, then runs one step; whether anything ran. Not to be called once started."""
        while self._inbox:
            self._inbox.popleft()()
        return self.batcher.step()

    def start(self) -> None:
        """Steps in a thread of its own, until `shutdown`."""
        self._thread = threading.Thread(target=self.run, name="executor", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Steps until `shutdown`. A fault of the executor's own ends the requests at hand, not the loop."""
        while True:
            with self._lock:
                if self._closing and not self._inbox and not self.batcher.answers.live:
                    return
            try:
                if not self.step():
                    self._wait()
            except Exception as error:
                try:
                    self._recover(error)
                except Exception as fatal:
                    self._stop(fatal)
                    return

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and returns when those at hand are done; without `drain`, or after so many seconds,
        these end with ShutdownError."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if drain:
            self._join(timeout)
        stop = ShutdownError("the server shuts down", hint="send the request to another server")
        with self._lock:
            self._inbox.append(lambda: self.batcher.fail_all(stop) if self.batcher.answers.live else None)
            self._lock.notify()
        self._join(None)

    def check(self) -> None:
        """Raises RuntimeError where the accounts contradict each other."""
        self.batcher.check()

    def _join(self, timeout: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            return
        end = None if timeout is None else self._clock() + timeout
        while (self._inbox or self.batcher.answers.live) and (end is None or self._clock() < end):
            self.step()

    def _end(self, handle: Handle, reason: FinishReason) -> None:
        with self._lock:
            self._inbox.append(lambda: self.batcher.answers.end(handle, reason))
            self._lock.notify()

    def _ask(self, work: Callable[[], int]) -> int:
        """Runs `work` between two steps and waits for its answer."""
        if self._thread is None or not self._thread.is_alive() or threading.current_thread() is self._thread:
            return work()
        answers: list[int] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(work())
            finally:
                done.set()

        with self._lock:
            self._inbox.append(run)
            self._lock.notify()
        done.wait()
        return answers[0] if answers else 0

    def _leave_queue(self, handle: Handle) -> None:
        with self._lock:
            self._queued[handle.request.priority] -= 1

    def _wait(self) -> None:
        deadline, waiting = self.batcher.answers.next_deadline, len(self.batcher.scheduler.waiting)
        seconds = STUCK_SECONDS if waiting else IDLE_SECONDS
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - self._clock()))
        with self._lock:
            if not self._inbox:
                self._lock.wait(seconds)

    def _forget(self, handle: Handle) -> None:
        if handle.partial.timing.first_scheduled is None:
            self._leave_queue(handle)
        with self._lock:
            same = self._handles[handle.request_id]
            same.remove(handle)
            if not same:
                del self._handles[handle.request_id]

    def _recover(self, error: Exception) -> None:
        failure = error if isinstance(error, TrtseekError) else ServingError(f"the executor failed: {error!r}")
        self.batcher.fail_all(failure)

    def _stop(self, error: Exception) -> None:
        """The pools cannot even be made anew: nobody may wait for what never comes."""
        with self._lock:
            self.error = error
            left = [handle for handles in self._handles.values() for handle in handles]
        for handle in left:
            handle.fail(ServingError(f"the executor stopped: {error!r}"))
