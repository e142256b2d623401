"""The pool's blocks: who holds which, what full ones contain, and which go when others are needed.

A block is free (nothing of worth in it), held (by one sequence or several), cached (held by nobody, but findable by its
content until another needs the room; `eviction.py` has the order), or dirty (to be zeroed before anyone gets it).
Content is found by a hash over the block's tokens and the hash of the block before it, so that it stands for all tokens
up to its end (as in vLLM, Kwon et al., 2023, arXiv 2309.06180). Only full blocks are published; these are never written
again. A block that several sequences hold before it is full is copied by whoever writes to it first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import CompatibilityError
from pipeline.runtime.eviction import EvictionOrder
from pipeline.runtime.retention import ORDINARY, Keep

Hash = bytes
HASH_BYTES = 16
PADDING = 0


class OutOfBlocksError(Exception):
    """More blocks were asked for than are available: the scheduler's accounts are wrong."""


@dataclass(slots=True)
class _Block:
    holders: int = 0
    pins: int = 0
    content: Hash | None = None
    keep: Keep = ORDINARY
    tainted: bool = False  # becomes dirty, not free, when the last holder lets go


def hash_blocks(tokens: Sequence[int], block_size: int, known: Sequence[Hash] = (), salt: str = "") -> list[Hash]:
    """Hashes of the full blocks of `tokens` after those already `known`. Cryptographic, because whoever could make two
    prompts collide would be answered from the other's cache."""
    before = known[-1] if known else hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    hashes = []
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        before = hashlib.blake2b(before + content, digest_size=HASH_BYTES).digest()
        hashes.append(before)
    return hashes


class BlockPool:
    """Blocks 1 to num_blocks - 1; block 0 is padding. `reuse` off: nothing is found by content."""

    def __init__(self, num_blocks: int, *, reuse: bool = True) -> None:
        if num_blocks < 2:
            raise CompatibilityError(f"{num_blocks} blocks: block 0 is padding, so at least 2 are needed")
        self.num_blocks, self.reuse = num_blocks, reuse
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, PADDING, -1))  # a stack: low numbers first, recently used ones again
        self._cached = EvictionOrder()
        self._now = 0.0
        self._places: dict[Hash, int] = {}
        self.dirty: list[int] = []
        self.pinned = 0

    @property
    def usable(self) -> int:
        """Blocks that sequences can hold."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that are held, pinned or dirty."""
        return self.usable - self.available

    @property
    def cached(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._places)

    def allocate(self, count: int) -> list[int]:
        """Blocks of undefined (finite) content, held once. Cached ones are given up where no free one is left."""
        if count > self.available:
            raise OutOfBlocksError(f"{count} blocks of {self.available}")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._cached.pop()
                self._forget(block)
            self._blocks[block].holders = 1
            blocks.append(block)
        return blocks

    def tick(self, now: float) -> None:
        """Tells the time, seconds that never go back: what was to be kept for a while is ordinary after it."""
        self._now = now
        self._cached.expire(now)

    def find(self, hashes: Iterable[Hash]) -> list[int]:
        """The blocks that hold the longest known beginning; nothing is held yet."""
        found = []
        for content in hashes:
            block = self._places.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        """Whether `hold` would take it out of the available ones."""
        return block in self._cached

    def is_pinned(self, block: int) -> bool:
        return self._blocks[block].pins > 0

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each: of blocks found, or of another sequence's."""
        for block in blocks:
            self._cached.discard(block)
            self._blocks[block].holders += 1

    def holders(self, block: int) -> int:
        return self._blocks[block].holders

    def release(self, blocks: Sequence[int], *, tainted: bool = False) -> None:
        """One holder less for each. Tainted ones are found no more, and become dirty when nobody holds them."""
        for block in reversed(blocks):  # the end of a sequence goes first: its beginning is of more use to others
            state = self._blocks[block]
            if state.holders < 1:
                raise OutOfBlocksError(f"block {block} was released once too often")
            if tainted:
                state.tainted = True
                self._forget(block)
            state.holders -= 1
            if state.holders == 0:
                self._settle(block)

    def publish(self, block: int, content: Hash, keep: Keep | None = None) -> None:
        """Makes a full block findable; where another already holds the same, that one stays it. See `retain`."""
        state = self._blocks[block]
        if self.reuse and state.content is None and not state.tainted and content not in self._places:
            state.content = content
            self._places[content] = block
        if (found := self._places.get(content)) is not None:
            self.retain(found, keep)

    def retain(self, block: int, keep: Keep | None) -> None:
        """How long a findable block is worth keeping, from when it is held by nobody; None leaves it as it is."""
        if keep is None:
            return
        self._blocks[block].keep = keep
        if block in self._cached:
            self._cached.discard(block)
            self._cached.add(block, self._now, keep)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keeps blocks that were found from being given up, until `unpin` is called as often."""
        for block in blocks:
            self._cached.discard(block)
            self._blocks[block].pins += 1
            self.pinned += self._blocks[block].pins == 1

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            state = self._blocks[block]
            if state.pins < 1:
                raise OutOfBlocksError(f"block {block} was unpinned once too often")
            state.pins -= 1
            self.pinned -= state.pins == 0
            if not state.holders:
                self._settle(block)

    def take_dirty(self) -> list[int]:
        """The dirty blocks, which the caller has zeroed: free from now on."""
        cleaned, self.dirty = self.dirty, []
        for block in cleaned:
            self._blocks[block].tainted = False
            self._free.append(block)
        return cleaned

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless every block is in exactly one state, and held by just these tables."""
        held = Counter(block for table in tables for block in table)
        free, dirty = set(self._free), set(self.dirty)
        problems = []
        if len(free) != len(self._free) or PADDING in free or held[PADDING]:
            problems.append("the free list repeats a block or holds the padding")
        for block in range(1, self.num_blocks):
            state = self._blocks[block]
            busy = state.holders > 0 or state.pins > 0
            states = (busy, block in free, block in self._cached, block in dirty)
            if sum(states) != 1 or state.holders != held[block]:
                problems.append(f"block {block}: {state.holders} holders of {held[block]}, states {states}")
            if (state.content is not None) != (self._places.get(state.content or b"") == block):
                problems.append(f"block {block} is not where its content is looked up")
            if (block in free or block in dirty or state.tainted) and state.content is not None:
                problems.append(f"block {block} can be found, but holds nothing")
            if block in self._cached and state.content is None:
                problems.append(f"block {block} is cached without content")
        if self.pinned != sum(state.pins > 0 for state in self._blocks):
            problems.append(f"{self.pinned} blocks are counted as pinned")
        if problems:
            raise RuntimeError("; ".join(problems))

    def _settle(self, block: int) -> None:
        """Finds the place of a block that nobody holds."""
        state = self._blocks[block]
        if state.pins:
            return
        if state.tainted:
            self.dirty.append(block)
        elif state.content is not None:
            self._cached.add(block, self._now, state.keep)
        else:
            self._free.append(block)

    def _forget(self, block: int) -> None:
        state = self._blocks[block]
        if state.content is not None:
            del self._places[state.content]
            state.content, state.keep = None, ORDINARY
