"""Decides, before every step, which sequences run and how many tokens of each: in-flight batching (Yu et al., "Orca",
OSDI 2022), with long prompts in chunks beside sequences that generate (Agrawal et al., 2023, arXiv 2308.16369).

Pure bookkeeping: no tensors, no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice

from pipeline.runtime.blocks import BlockPool, Hash
from pipeline.runtime.errors import RequestError
from pipeline.runtime.limits import Limits
from pipeline.runtime.line import WaitingLine
from pipeline.runtime.policy import Demand, Policy
from pipeline.runtime.retention import Keep
from pipeline.runtime.selection import Selector, Work
from pipeline.runtime.sequence import Sequence


@dataclass(slots=True)
class Schedule:
    """One step. copies: blocks (from, to) to copy before it. started and paused: who joined and who left."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)


class Scheduler:
    """`preempt`: whether a sequence pauses others of a lower class where there is no room for it."""

    def __init__(
        self, limits: Limits, pool: BlockPool, policy: Policy, *, preempt: bool = True, ageing: float | None = None
    ) -> None:
        self.limits, self.pool, self.policy, self.preempt, self.ageing = limits, pool, policy, preempt, ageing
        self.waiting = WaitingLine(ageing)
        self.running: list[Sequence] = []
        self._computing: dict[Hash, Sequence] = {}
        self._selector = Selector(limits)
        self._demand = Demand(limits, pool, policy)
        self._step = 0

    def check_size(self, sequence: Sequence) -> None:
        """Raises RequestError for a request that could never run."""
        request, room = sequence.request, self.pool.usable - self.pool.pinned
        if request.num_return_sequences > self.limits.max_batch_size:
            raise RequestError(
                "num_return_sequences",
                f"is {request.num_return_sequences}: at most {self.limits.max_batch_size} sequences run at a time",
            )
        if (demand := self._demand.whole(sequence)) > room:
            raise RequestError(
                "max_tokens",
                f"is {request.max_tokens}, which after a prompt of {sequence.prompt_length} tokens needs {demand} "
                f"cache blocks of {room}",
                hint="ask for fewer tokens or sequences, or give the cache more blocks",
            )

    def add(self, sequence: Sequence) -> None:
        self.check_size(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Takes a sequence out, wherever it is. `tainted`: what it wrote must not be read again."""
        if sequence.is_running:
            self._leave(sequence, tainted=tainted)
        else:
            self.waiting.remove(sequence)

    def plan(self, now: float) -> Schedule:
        """The next step; no work where nothing can run. The caller computes it, then calls `advance` for each part."""
        schedule = Schedule()
        self.pool.tick(now)
        self._admit(schedule, now)
        while self.running and not schedule.work:  # whoever was chosen may have had to pause
            chosen = self._selector.select(self._ranked(now), lambda sequence: sequence.rank(now, self.ageing)[0])
            self._grant(chosen, schedule, now)
        self._step += 1
        return schedule

    def advance(self, work: Work) -> None:
        """The step went well: the tokens are in the cache, and full blocks can be found by others."""
        sequence, size = work.sequence, self.limits.block_size
        sequence.cached += work.count
        full = sequence.cached // size
        if full > sequence.published:
            hashes = sequence.full_hashes(size)
            for place in range(sequence.published, full):
                self.pool.publish(sequence.table[place], hashes[place], self._keep(sequence, place))
                if self._computing.get(hashes[place]) is sequence:
                    del self._computing[hashes[place]]
            sequence.published = full

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that one becomes whose prompt is computed, itself first."""
        others = [sequence.fork(index) for index in range(1, sequence.width)]
        sequence.width = 1
        for other in others:
            self.pool.hold(other.table)
            self.running.append(other)
        return [sequence, *others]

    def pin(self, blocks: Many[int]) -> bool:
        """Pins blocks that were found, unless what runs or waits then could not be served."""
        free = self.pool.available - self._demand.reserved(self.running) - sum(map(self.pool.is_idle, blocks))
        room = self.pool.usable - self.pool.pinned - sum(not self.pool.is_pinned(block) for block in blocks)
        largest = max((self._demand.whole(sequence) for sequence in (*self.running, *self.waiting)), default=0)
        if free < 0 or room < largest:
            return False
        self.pool.pin(blocks)
        return True

    def check(self) -> None:
        """Raises RuntimeError where the accounts contradict each other."""
        self.pool.check(sequence.table for sequence in self.running)
        if sum(sequence.width for sequence in self.running) > self.limits.max_batch_size:
            raise RuntimeError("more sequences run than may")
        if any(sequence.table or sequence.is_running for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        owners = set(map(id, self._computing.values()))
        if not owners <= set(map(id, self.running)):
            raise RuntimeError("others wait for blocks that nobody computes")

    # Starting

    def _admit(self, schedule: Schedule, now: float) -> None:
        if not self.waiting:
            return
        for sequence in list(islice(self.waiting.in_order(now), 2 * self.limits.max_batch_size)):
            found = self._find(sequence)
            if self._is_computed(sequence, len(found), now):
                continue  # the next step, or one soon after, finds those blocks
            victims = self._make_room(sequence, found, now)
            if victims is None:
                break  # nobody overtakes, or a large request would never find room
            for victim in victims:
                self._pause(victim, schedule)
            self._start(sequence, found)
            schedule.started.append(sequence)

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks of others that hold its beginning; its last token is always computed, for its logits."""
        if not sequence.reads_shared or not self.pool.reuse:
            return []
        size = self.limits.block_size
        return self.pool.find(sequence.full_hashes(size)[: (len(sequence.tokens) - 1) // size])

    def _is_computed(self, sequence: Sequence, found: int, now: float) -> bool:
        """Whether a running sequence is about to publish the block that is missing next."""
        if not sequence.reads_shared or found >= (len(sequence.tokens) - 1) // self.limits.block_size:
            return False
        owner = self._computing.get(sequence.hashes[found]) if self.pool.reuse else None
        return owner is not None and owner.rank(now, self.ageing)[0] <= sequence.rank(now, self.ageing)[0]

    def _make_room(self, sequence: Sequence, found: list[int], now: float) -> list[Sequence] | None:
        """Whom to pause so that it can start; None where that does not help."""
        seats = self.limits.max_batch_size - sum(other.width for other in self.running) - sequence.width
        spare = self.pool.available - self._demand.reserved(self.running) - sum(map(self.pool.is_idle, found))
        spare -= self._demand.to_start(sequence) - len(found)
        if self.policy is Policy.MAX_UTILIZATION:
            spare -= len(self.running)  # the next block of each, so that it does not pause at once
        victims: list[Sequence] = []
        if seats >= 0 and spare >= 0:
            return victims
        if not self.preempt:
            return None
        level = sequence.rank(now, self.ageing)[0]
        lower = [other for other in self._ranked(now) if other.rank(now, self.ageing)[0] > level]
        let_go: Counter[int] = Counter()
        kept = set(found)
        while lower and (seats < 0 or spare < 0):
            victim = lower.pop()
            victims.append(victim)
            seats += victim.width
            spare += self._demand.pending(victim) + (self.policy is Policy.MAX_UTILIZATION)
            for block in victim.table:
                let_go[block] += 1
                spare += let_go[block] == self.pool.holders(block) and block not in kept
        return victims if seats >= 0 and spare >= 0 else None

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        self.pool.hold(found)
        for place, block in enumerate(found):
            self.pool.retain(block, self._keep(sequence, place))
        sequence.table = list(found)
        sequence.published = len(found)
        sequence.reused += len(found)
        sequence.cached = len(found) * self.limits.block_size
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.is_running = True
        if self.pool.reuse:
            for content in sequence.full_hashes(self.limits.block_size)[len(found) :]:
                if self._computing.setdefault(content, sequence) is sequence:
                    sequence.promised.append(content)

    # Blocks

    def _keep(self, sequence: Sequence, place: int) -> Keep | None:
        retention = sequence.request.retention
        if retention is None:
            return None
        return retention.of_block(place * self.limits.block_size, sequence.prompt_length)

    def _grant(self, chosen: list[Work], schedule: Schedule, now: float) -> None:
        """Gives each its blocks, the first in rank first; with max_utilization, at the cost of the last."""
        granted: set[int] = set()
        for work in sorted(chosen, key=lambda work: work.sequence.rank(now, self.ageing)):
            sequence = work.sequence
            shared = self._demand.shared_tail(sequence) if sequence.is_running else None
            needed = self.limits.blocks_for(sequence.cached + work.count) - len(sequence.table)
            while sequence.is_running and self.policy is Policy.MAX_UTILIZATION:
                if self.pool.available >= needed + (shared is not None):
                    break
                self._pause(next(other for other in reversed(self._ranked(now)) if id(other) not in granted), schedule)
                shared = self._demand.shared_tail(sequence) if sequence.is_running else None
            if not sequence.is_running:
                continue
            if shared is not None:
                (copy,) = self.pool.allocate(1)
                schedule.copies.append((shared, copy))
                sequence.table[sequence.cached // self.limits.block_size] = copy
                self.pool.release([shared])
            sequence.table += self.pool.allocate(needed)
            sequence.given += needed + (shared is not None)
            sequence.last_step = self._step
            granted.add(id(sequence))
            schedule.work.append(work)

    def _pause(self, sequence: Sequence, schedule: Schedule) -> None:
        self._leave(sequence)
        sequence.drop()
        self.waiting.add(sequence)
        schedule.paused.append(sequence)

    def _leave(self, sequence: Sequence, *, tainted: bool = False) -> None:
        self.running.remove(sequence)
        sequence.is_running = False
        for content in sequence.promised:
            if self._computing.get(content) is sequence:
                del self._computing[content]
        self.pool.release(sequence.table, tainted=tainted)

    def _ranked(self, now: float) -> list[Sequence]:
        return sorted(self.running, key=lambda sequence: sequence.rank(now, self.ageing))
