"""What a scheduling policy asks of the pool: how many blocks a sequence has to have, and has yet to ask for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from pipeline.runtime.blocks import BlockPool
from pipeline.runtime.limits import Limits
from pipeline.runtime.sequence import Sequence


class Policy(Enum):
    """guaranteed_no_evict: a sequence starts only if the blocks for its longest possible answer are there, and is not
    paused for want of any. max_utilization: it starts when its prompt fits; when blocks run out, the last ones pause
    and compute their tokens again later. The names are TensorRT-LLM's."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True)
class Demand:
    """Counts blocks under a policy."""

    limits: Limits
    pool: BlockPool
    policy: Policy

    def whole(self, sequence: Sequence) -> int:
        """Blocks for its longest answer. Sequences that can pause need not all fit together."""
        whole = self.limits.blocks_for(sequence.longest)
        if self.policy is Policy.MAX_UTILIZATION or sequence.width == 1:
            return whole
        shared = sequence.prompt_length // self.limits.block_size
        return shared + sequence.width * (whole - shared)

    def to_start(self, sequence: Sequence) -> int:
        """Blocks that it is to have before another starts: all it can ever need, or those for the tokens it has."""
        if self.policy is Policy.MAX_UTILIZATION:
            return self.limits.blocks_for(len(sequence.tokens))
        return self.whole(sequence)

    def pending(self, sequence: Sequence) -> int:
        """Of those, what it does not have yet."""
        return max(0, self.to_start(sequence) - len(sequence.table))

    def reserved(self, running: Collection[Sequence]) -> int:
        """Blocks that the running sequences will still ask for, copies of shared unfinished blocks among them."""
        shared = {block for sequence in running if (block := self.shared_tail(sequence)) is not None}
        return sum(map(self.pending, running)) + sum(self.pool.holders(block) - 1 for block in shared)

    def shared_tail(self, sequence: Sequence) -> int | None:
        """The block that its next token goes to, if it is begun and others hold it too."""
        place, offset = divmod(sequence.cached, self.limits.block_size)
        if not offset or self.pool.holders(sequence.table[place]) < 2:
            return None
        return sequence.table[place]
