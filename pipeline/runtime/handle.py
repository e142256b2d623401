"""What a caller holds of a request: its updates as they come, its result, and the way to cancel it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrtseekError
from pipeline.runtime.request import FinishReason, Request

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Update:
    """News of one sequence of a request.

    tokens: new ones; all of them where the request does not stream. log_probs: one for each, where asked for.
    finish_reason: None while the sequence goes on. is_final: nothing of the request comes after this.
    error: the request failed, and nothing of it comes after this; sequence_index and tokens mean nothing then.
    """

    request: Request
    request_id: str
    sequence_index: int
    tokens: list[int]
    log_probs: list[float] | None = None
    finish_reason: FinishReason | None = None
    is_final: bool = False
    error: TrtseekError | None = None

    @property
    def output_ids(self) -> list[int]:
        """As the `tensorrt_llm` model answers: the prompt comes first unless the request streams or excludes it."""
        if self.request.streaming or self.request.exclude_input_in_output:
            return self.tokens
        return [*self.request.input_ids, *self.tokens]


@dataclass(slots=True, kw_only=True)
class Output:
    """One sequence: its tokens without the end id; log-probs of these, and logits [tokens, V], where asked for.
    cum_log_prob: the sum of log_probs."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    generation_logits: list[Tensor] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def cum_log_prob(self) -> float:
        return sum(self.log_probs)


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds on the executor's clock; None for what has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, kw_only=True)
class Result:
    """outputs: by sequence index. context_logits: [prompt, V]. context_log_probs: of the prompt from its second token.
    seed: what was drawn with. reused_blocks: cache blocks found when it started; new_blocks: cache blocks it was given;
    total_blocks: both together. times_paused: how often a sequence of it lost its blocks to others."""

    request_id: str
    outputs: list[Output]
    seed: int
    timing: Timing
    context_logits: Tensor | None = None
    context_log_probs: list[float] | None = None
    reused_blocks: int = 0
    new_blocks: int = 0
    times_paused: int = 0

    @property
    def total_blocks(self) -> int:
        return self.reused_blocks + self.new_blocks


Callback = Callable[[Update], Any]


class Handle:
    """One request in an executor. Iterate over its updates, or give `submit` a callback instead; `result` works in both
    cases. All methods may be called from any thread."""

    def __init__(
        self,
        request: Request,
        result: Result,
        *,
        end: Callable[[Handle, FinishReason], None],
        on_update: Callback | None = None,
    ) -> None:
        self.request, self.request_id, self.on_update = request, result.request_id, on_update
        self.partial = result  # the executor fills it while the request runs
        self.stop_words = [list(word) for word in request.stop_words]
        self.error: TrtseekError | None = None
        self._end = end
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._done = threading.Event()

    def cancel(self) -> None:
        """Ends the request within a step; its sequences finish with CANCELLED. Without effect once it is done."""
        self._end(self, FinishReason.CANCELLED)

    def finish(self) -> None:
        """As `cancel`, of a request that has said what was wanted: a stop word was found, by whoever looks for it."""
        self._end(self, FinishReason.STOP_WORDS)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the end. Raises the request's error, or TimeoutError after so many seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not done after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.partial

    def __iter__(self) -> Iterator[Update]:
        """Updates as they come; raises the request's error. For one reader, and not together with a callback."""
        while True:
            update = self._updates.get()
            if update.error is not None:
                raise update.error
            yield update
            if update.is_final:
                return

    def deliver(self, update: Update) -> None:
        """Called by the executor only. What the callback raises goes to the executor, which cancels the request."""
        if update.error is not None:
            self.error = update.error
        if self.on_update is None:
            self._updates.put(update)
        try:
            if self.on_update is not None:
                self.on_update(update)
        finally:
            if update.is_final:
                self._done.set()

    def fail(self, error: TrtseekError) -> None:
        """Called by the executor only: the request ends with an error."""
        name = self.request_id
        self.deliver(
            Update(request=self.request, request_id=name, sequence_index=0, tokens=[], is_final=True, error=error)
        )
