"""The pool against a model that keeps what every block contains."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pipeline.errors import CompatibilityError
from pipeline.runtime.blocks import BlockPool, OutOfBlocksError, hash_blocks
from pipeline.runtime.retention import Keep

SIZE = 2
BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences of few tokens, so that beginnings collide. `content`: what each block holds, by the tokens up to its
    end; `tables`: who holds what."""

    sequences = Bundle("sequences")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.content: dict[int, tuple[int, ...] | None] = {}
        self.tables: dict[int, list[int]] = {}
        self.bad: set[int] = set()  # blocks that were tainted and not zeroed yet
        self.pinned: list[list[int]] = []
        self.count = 0
        self.now = 0.0

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> int:
        hashes = hash_blocks(tokens, SIZE)
        found = self.pool.find(hashes)
        for place, block in enumerate(found):  # what is found is what was asked for
            assert self.content[block] == tuple(tokens[: (place + 1) * SIZE])
            assert block not in self.bad
        self.pool.hold(found)
        self.count += 1
        self.tables[self.count] = list(found)
        needed = -(-len(tokens) // SIZE) - len(found)
        if needed > self.pool.available:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(needed)
            self.pool.release(found)
            del self.tables[self.count]
            return 0
        new = self.pool.allocate(needed)
        held = [block for table in self.tables.values() for block in table]
        assert not set(new) & (set(held) | self.bad | {b for pin in self.pinned for b in pin})
        self.tables[self.count] += new
        for place in range(len(found), len(hashes)):
            self.content[new[place - len(found)]] = tuple(tokens[: (place + 1) * SIZE])
            self.pool.publish(new[place - len(found)], hashes[place])
        if len(tokens) % SIZE:
            self.content[new[-1]] = None
        return self.count

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        if sequence not in self.tables:
            return 0
        self.pool.hold(self.tables[sequence])
        self.count += 1
        self.tables[self.count] = list(self.tables[sequence])
        return self.count

    @rule(sequence=consumes(sequences))
    def end(self, sequence: int) -> None:
        if (table := self.tables.pop(sequence, None)) is not None:
            self.pool.release(table)

    @rule(sequence=consumes(sequences))
    def fail(self, sequence: int) -> None:
        if (table := self.tables.pop(sequence, None)) is not None:
            self.pool.release(table, tainted=True)
            self.bad |= set(table)

    @rule()
    def zero(self) -> None:
        assert set(self.pool.dirty) <= self.bad
        self.bad -= set(self.pool.take_dirty())

    @rule(target=pins, tokens=st.lists(st.integers(0, 1), min_size=2, max_size=4))
    def pin(self, tokens: list[int]) -> list[int]:
        blocks = self.pool.find(hash_blocks(tokens, SIZE))
        self.pool.pin(blocks)
        self.pinned.append(blocks)
        return blocks

    @rule(blocks=consumes(pins))
    def unpin(self, blocks: list[int]) -> None:
        self.pool.unpin(blocks)
        self.pinned.remove(blocks)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=4),
        priority=st.sampled_from([0, 35, 90]),
        duration=st.sampled_from([None, 0.0, 3.0]),
    )
    def retain(self, tokens: list[int], priority: int, duration: float | None) -> None:
        for block in self.pool.find(hash_blocks(tokens, SIZE)):
            self.pool.retain(block, Keep(priority, duration))

    @rule()
    def wait(self) -> None:
        self.now += 1.0
        self.pool.tick(self.now)

    @precondition(lambda self: self.tables)
    @rule()
    def nothing_is_held_twice_by_mistake(self) -> None:
        for block in range(1, BLOCKS):
            assert self.pool.holders(block) == sum(block in table for table in self.tables.values())

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check(self.tables.values())
        busy = {b for table in self.tables.values() for b in table} | {b for pin in self.pinned for b in pin}
        assert self.pool.available == BLOCKS - 1 - len(busy | set(self.pool.dirty))
        assert self.pool.pinned == len({b for pin in self.pinned for b in pin})

    def teardown(self) -> None:
        for table in self.tables.values():
            self.pool.release(table)
        for blocks in self.pinned:
            self.pool.unpin(blocks)
        self.pool.take_dirty()
        self.pool.check([])
        assert self.pool.available == BLOCKS - 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def held(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks for tokens, published and let go."""
    hashes = hash_blocks(tokens, SIZE, salt=salt)
    blocks = pool.allocate(len(hashes))
    for block, content in zip(blocks, hashes, strict=True):
        pool.publish(block, content)
    pool.release(blocks)
    return blocks


def test_a_hash_stands_for_everything_before_it() -> None:
    one, other = hash_blocks([1, 2, 3, 4], SIZE), hash_blocks([9, 2, 3, 4], SIZE)
    assert one[1] != other[1]
    assert hash_blocks([1, 2, 3, 4, 5], SIZE) == one
    assert hash_blocks([1, 2, 3, 4, 5, 6], SIZE, one) == hash_blocks([1, 2, 3, 4, 5, 6], SIZE)[2:]


def test_a_salt_parts_what_is_equal() -> None:
    assert not set(hash_blocks([1, 2, 3, 4], SIZE)) & set(hash_blocks([1, 2, 3, 4], SIZE, salt="tenant"))


def test_the_least_recently_used_goes_first_and_ends_go_before_beginnings() -> None:
    pool = BlockPool(7)
    old, new = held(pool, [1, 1, 2, 2, 3, 3]), held(pool, [5, 5, 6, 6, 7, 7])
    found = pool.find(hash_blocks([1, 1], SIZE))
    assert found == old[:1]
    pool.hold(found)
    pool.release(found)  # used again
    assert pool.allocate(5) == [old[2], old[1], new[2], new[1], new[0]]
    assert pool.find(hash_blocks([1, 1, 2, 2], SIZE)) == old[:1]


def test_a_lower_priority_goes_first_whenever_it_was_used() -> None:
    pool = BlockPool(7)
    (dear,), (plain,), (cheap,) = held(pool, [1, 1]), held(pool, [2, 2]), held(pool, [3, 3])
    pool.retain(dear, Keep(90))
    pool.retain(cheap, Keep(10))
    pool.allocate(3)  # those that were free
    assert [pool.allocate(1) for _ in range(3)] == [[cheap], [plain], [dear]]


def test_a_priority_ends_with_its_duration_which_begins_when_nobody_holds_the_block() -> None:
    pool = BlockPool(5)
    (dear,) = held(pool, [1, 1])
    pool.retain(dear, Keep(90, 10.0))
    pool.tick(9.0)
    pool.hold([dear])
    pool.release([dear])
    (later,) = held(pool, [2, 2])
    pool.allocate(2)
    pool.tick(18.0)
    assert pool.allocate(1) == [later]
    pool.release([later])
    (newest,) = held(pool, [3, 3])
    pool.tick(19.0)
    assert pool.allocate(1) == [dear]  # an ordinary one again, used longest ago
    assert pool.allocate(1) == [newest]


def test_a_block_that_was_given_up_is_an_ordinary_one() -> None:
    pool = BlockPool(3)
    (first,) = held(pool, [1, 1])
    pool.retain(first, Keep(90))
    pool.allocate(2)
    pool.release([first])
    assert held(pool, [2, 2]) == [first]
    pool.publish(first, hash_blocks([2, 2], SIZE)[0])
    (other,) = [block for block in (1, 2) if block != first]
    pool.release([other])
    assert held(pool, [3, 3]) == [other]
    assert pool.allocate(2) == [first, other]


def test_a_copy_of_known_content_says_how_long_the_known_one_is_kept() -> None:
    pool = BlockPool(4)
    (known,), (plain,) = held(pool, [1, 1]), held(pool, [2, 2])
    (copy,) = pool.allocate(1)
    pool.publish(copy, hash_blocks([1, 1], SIZE)[0], Keep(90))
    pool.release([copy])
    pool.allocate(1)
    assert pool.allocate(2) == [plain, known]


def test_a_second_copy_of_known_content_is_not_found_and_is_freed() -> None:
    pool = BlockPool(5)
    first = pool.allocate(1)
    second = pool.allocate(1)
    (content,) = hash_blocks([1, 1], SIZE)
    pool.publish(first[0], content)
    pool.publish(second[0], content)
    assert pool.find([content]) == first
    pool.release(second)
    assert pool.cached == 1 and not pool.is_idle(second[0])
    pool.release(first)
    assert pool.is_idle(first[0])


def test_a_tainted_block_is_dirty_only_when_the_last_lets_go() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    hashes = hash_blocks([1, 1], SIZE)
    pool.publish(blocks[0], hashes[0])
    pool.hold(blocks[:1])  # a neighbour with the same beginning
    pool.release(blocks, tainted=True)
    assert pool.dirty == [blocks[1]] and not pool.find(hashes)
    pool.publish(blocks[0], hashes[0])
    assert not pool.find(hashes)  # it stays unknown
    pool.release(blocks[:1])
    assert sorted(pool.dirty) == sorted(blocks) and pool.available == 2
    assert sorted(pool.take_dirty()) == sorted(blocks) and pool.available == 4


def test_without_reuse_nothing_is_found() -> None:
    pool = BlockPool(4, reuse=False)
    held(pool, [1, 1])
    assert not pool.find(hash_blocks([1, 1], SIZE)) and pool.available == 3


def test_mistakes_are_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks of 1"):
        pool.allocate(2)
    pool.check([blocks])
    for tables in ([], [blocks, blocks], [[blocks[0]]]):
        with pytest.raises(RuntimeError, match="holders"):
            pool.check(tables)
    pool.release(blocks)
    with pytest.raises(OutOfBlocksError, match="once too often"):
        pool.release(blocks[:1])
    with pytest.raises(OutOfBlocksError, match="unpinned once too often"):
        pool.unpin(blocks[:1])
    with pytest.raises(CompatibilityError, match="block 0 is padding"):
        BlockPool(1)
