"""Runs requests together: each step computes what the scheduler chose and draws tokens from its logits.

One thread calls everything here; `executor.py` is the door for others.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.errors import TrtseekError
from pipeline.runtime.answers import Answers
from pipeline.runtime.blocks import BlockPool, hash_blocks
from pipeline.runtime.errors import NonFiniteError, RunnerError
from pipeline.runtime.handle import Handle
from pipeline.runtime.limits import Limits
from pipeline.runtime.policy import Policy
from pipeline.runtime.scheduler import Schedule, Scheduler
from pipeline.runtime.selection import Work
from pipeline.runtime.sequence import Sequence
from pipeline.runtime.statistics import Statistics
from pipeline.runtime.steps import Chunk, plan_step

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.runtime.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherSettings:
    """preempt: a sequence may pause others of a lower class. ageing: seconds after which a sequence counts as one class
    higher; None: never. reuse_blocks: requests share blocks with the same content."""

    policy: Policy = Policy.GUARANTEED_NO_EVICT
    preempt: bool = True
    ageing: float | None = 30.0
    reuse_blocks: bool = True


class Batcher:
    """failures: steps in a row that the runner failed. on_start, on_close: see Answers."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        settings: BatcherSettings,
        statistics: Statistics,
        clock: Callable[[], float],
        on_start: Callable[[Handle], None],
        on_close: Callable[[Handle], None],
    ) -> None:
        self.runner, self.limits, self._settings = runner, limits, settings
        self._statistics, self._clock, self._on_start, self._on_close = statistics, clock, on_start, on_close
        self.failures = 0
        self._start_over()

    def _start_over(self) -> None:
        self.runner.allocate(self.limits.num_blocks)
        settings = self._settings
        self.pool = BlockPool(self.limits.num_blocks, reuse=settings.reuse_blocks)
        self.scheduler = Scheduler(
            self.limits, self.pool, settings.policy, preempt=settings.preempt, ageing=settings.ageing
        )
        self.answers = Answers(self.scheduler, self._statistics, self._on_start, self._on_close)
        self._pins: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def fail_all(self, error: TrtseekError) -> None:
        """Ends every request with an error and starts over with empty pools."""
        self.answers.abandon(error)
        self._start_over()

    def step(self) -> bool:
        """Whether anything ran."""
        now = self._clock()
        self.answers.expire(now)
        if not self._clean():
            return True
        schedule = self.scheduler.plan(now)
        for sequence in schedule.paused:
            self.answers.pause(sequence)
        for sequence in schedule.started:
            self.answers.start(sequence, now)
        if schedule.work:
            self._run(schedule)
        self._report(schedule)
        return bool(schedule.work)

    def pin(self, tokens: Many[int], cache_salt: str) -> int:
        """Keeps the cached blocks of this beginning, unless the requests at hand need the room; how many of its tokens
        are pinned."""
        key = (cache_salt, tuple(tokens))
        blocks = self.pool.find(hash_blocks(tokens, self.limits.block_size, salt=cache_salt))
        if key not in self._pins and blocks and self.scheduler.pin(blocks):
            self._pins[key] = blocks
        return len(self._pins.get(key, ())) * self.limits.block_size

    def unpin(self, tokens: Many[int], cache_salt: str) -> int:
        """How many tokens were pinned."""
        blocks = self._pins.pop((cache_salt, tuple(tokens)), [])
        self.pool.unpin(blocks)
        return len(blocks) * self.limits.block_size

    def check(self) -> None:
        """Raises RuntimeError where the accounts of blocks and requests contradict each other."""
        self.scheduler.check()
        known = {id(sequence) for sequences in self.answers.live.values() for sequence in sequences}
        if known != set(map(id, (*self.scheduler.running, *self.scheduler.waiting))):
            raise RuntimeError("the scheduler's sequences are not those of the live requests")

    def _clean(self) -> bool:
        """Zeroes what failed requests wrote. False where even that failed: then everything starts over."""
        if self.pool.dirty:
            try:
                self.runner.zero_blocks(list(self.pool.dirty))
            except Exception as error:  # what the runner holds is unknown now
                self.failures += 1
                self.fail_all(RunnerError(f"cache blocks could not be zeroed: {error!r}", hint="the cache was emptied"))
                return False
            self.pool.take_dirty()
        return True

    def _run(self, schedule: Schedule) -> None:
        chunks = [self._chunk(work) for work in schedule.work]
        plan = plan_step(chunks, block_size=self.limits.block_size, num_blocks=self.limits.num_blocks)
        try:
            if schedule.copies:
                self.runner.copy_blocks(schedule.copies)
            logits = self.runner.step(plan.inputs)
            finite = _finite_rows(logits)
        except Exception as error:  # whatever it was: those in this step are told, and the others go on
            self.failures += 1
            failure = RunnerError(f"the runner failed: {error!r}", hint="the request can be sent again")
            for handle in dict.fromkeys(work.sequence.handle for work in schedule.work):
                self.answers.fail(handle, failure)
        else:
            self.failures = 0
            self._collect(schedule.work, chunks, logits, finite)

    def _chunk(self, work: Work) -> Chunk:
        """The last row's logits are wanted even in the middle of a prompt: that row has seen all before it, so that
        finite ones vouch for everything written so far, before others may share it."""
        sequence = work.sequence
        start = sequence.cached
        return Chunk(
            tokens=sequence.tokens[start : start + work.count],
            start=start,
            block_table=sequence.table,
            logits="last" if sequence.reads_shared else "all",
        )

    def _collect(self, work: list[Work], chunks: list[Chunk], logits: Tensor, finite: npt.NDArray[np.bool_]) -> None:
        counts = np.array([len(chunk.tokens) if chunk.logits == "all" else 1 for chunk in chunks])
        ends = np.cumsum(counts)
        good = np.logical_and.reduceat(finite, ends - counts)
        drawing: list[Sequence] = []
        rows: list[int] = []
        for part, chunk, end, is_good in zip(work, chunks, ends.tolist(), good.tolist(), strict=True):
            sequence, handle = part.sequence, part.sequence.handle
            if handle not in self.answers.live:
                continue  # another of its sequences failed in this very step
            if not is_good:
                problem = f"request {handle.request_id}: the network's logits are not finite"
                self.answers.fail(handle, NonFiniteError(problem, hint="the weights or this prompt overflow the type"))
                continue
            is_last = part.is_last
            if chunk.logits == "all":
                context = self.answers.contexts[handle]
                context.add(logits[end - len(chunk.tokens) : end], chunk.start)
                if is_last:
                    context.fill(handle.partial)
            self.scheduler.advance(part)
            if is_last:
                forks = self.scheduler.fork(sequence)
                self.answers.live[handle] += forks[1:]
                drawing += forks
                rows += [end - 1] * len(forks)
        if drawing:
            self._draw(drawing, rows, logits)

    def _draw(self, drawing: list[Sequence], rows: list[int], logits: Tensor) -> None:
        """The next token of each sequence, from its row of the logits."""
        import torch

        from pipeline.runtime.sampler import choose_tokens, log_probs

        probabilities: list[float | None] = [None] * len(drawing)
        with torch.inference_mode():
            if rows != list(range(len(logits))):
                logits = logits[torch.tensor(rows, device=logits.device)]
            tokens = choose_tokens(logits, [sequence.history for sequence in drawing])
            wanted = [i for i, sequence in enumerate(drawing) if sequence.request.return_log_probs and tokens[i] >= 0]
            if wanted:
                chosen = torch.tensor([tokens[i] for i in wanted], device=logits.device)
                places = torch.tensor(wanted, device=logits.device)
                for i, value in zip(wanted, log_probs(logits[places], chosen).tolist(), strict=True):
                    probabilities[i] = value
        now = self._clock()
        for i, (sequence, token) in enumerate(zip(drawing, tokens, strict=True)):
            handle: Handle = sequence.handle
            if handle not in self.answers.live:
                continue  # its callback failed, or another of its sequences did
            if sequence.request.return_generation_logits and token != sequence.request.end_id:
                handle.partial.outputs[sequence.index].generation_logits.append(logits[i].to("cpu", copy=True))
            self.answers.append(sequence, token, probabilities[i], now)
        self._statistics.add(generated_tokens=len(drawing))

    def _report(self, schedule: Schedule) -> None:
        pool = self.pool
        chunks = [work.count for work in schedule.work if work.count > 1]
        self._statistics.set(
            active_requests=len(self.answers.live),
            scheduled_requests=len(schedule.work),
            context_requests=len(chunks),
            context_tokens=sum(chunks),
            generation_requests=len(schedule.work) - len(chunks),
            waiting_requests=len(self.scheduler.waiting),
            max_requests=self.limits.max_batch_size,
            used_blocks=pool.used,
            free_blocks=pool.available,
            max_blocks=pool.usable,
            cached_blocks=pool.cached,
            pinned_blocks=pool.pinned,
            tokens_per_block=self.limits.block_size,
            block_fraction=pool.used / pool.usable,
        )
        self._statistics.add(iterations=bool(schedule.work))


def _finite_rows(logits: Tensor) -> npt.NDArray[np.bool_]:
    """Which rows hold neither NaN nor an infinity: either reaches the smallest or the largest value. (torch's `aminmax`
    and `isfinite` over the rows take twenty times as long on a CPU.)"""
    low, high = logits.amin(-1).cpu().numpy(), logits.amax(-1).cpu().numpy()
    finite: npt.NDArray[np.bool_] = np.isfinite(low) & np.isfinite(high)
    return finite
