"""What an engine's runner must do as the interpreter does, step by step. `benchmarks.gpu` runs it on a GPU.

Logits are compared with those of `exact` mode. An engine rounds what the network declares, but in its own order: its
error may be a few times that of `declared` mode. Greedy tokens may differ where the two best logits of exact mode are
closer than what `fast` mode is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.isolation import describe_error
from pipeline.interpreter.numerics import FAST_MARGIN
from pipeline.runtime.runner import Runner
from pipeline.runtime.steps import Chunk, plan_step

MOST_ERROR = 4.0  # of declared mode's
LEAST_ERROR = 1e-5  # of the logits' spread: what sums in another order make, where nothing is rounded
# What the checks need of an engine.
BLOCKS, BATCH, ROWS, CHUNK, LENGTH = 100, 8, 256, 128, 192
PROMPTS, GENERATED = (5, 64, 65, 100), 24


@dataclass
class Subject:
    """What is checked, and the interpreter in two modes, all with as many blocks. vocab: of the model."""

    runner: Runner
    exact: Runner
    declared: Runner
    block_size: int
    vocab: int
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def reset(self) -> None:
        for runner in (self.runner, self.exact, self.declared):
            runner.allocate(BLOCKS)

    def tokens(self, count: int) -> list[int]:
        drawn: list[int] = torch.randint(2, self.vocab, (count,), generator=self.draw).tolist()
        return drawn

    def plan(self, chunks: list[Chunk]) -> Any:
        return plan_step(chunks, block_size=self.block_size, num_blocks=BLOCKS).inputs

    def step(self, runner: Runner, chunks: list[Chunk]) -> torch.Tensor:
        return runner.step(self.plan(chunks)).float().cpu()

    def compare(self, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row: the error of what is checked, and of declared mode, in units of the row's spread."""
        exact = self.step(self.exact, chunks)
        spread = exact.std(-1)
        found, rounded = ((self.step(r, chunks) - exact).abs().amax(-1) / spread for r in (self.runner, self.declared))
        return found, rounded


Check = Callable[[Subject], str]


def check_context(subject: Subject) -> str:
    """Prompts, whole and in chunks, in scattered blocks, beside sequences that generate already."""
    return _judge(subject, _context_steps(subject))


def check_generation(subject: Subject) -> str:
    """Steps of one token each at every batch: padded, by graph and before."""
    return _judge(subject, _generation_steps(subject))


def check_tokens(subject: Subject) -> str:
    """Greedy generation, a batch of unequal prompts, against exact mode step by step with the same tokens."""
    subject.reset()
    tables = subject_tables(subject, [count + GENERATED for count in PROMPTS])
    chunks = [Chunk(tokens=subject.tokens(n), start=0, block_table=t) for n, t in zip(PROMPTS, tables, strict=True)]
    other = near = 0
    for _ in range(GENERATED):
        exact, found = (subject.step(runner, chunks) for runner in (subject.exact, subject.runner))
        best, second = exact.topk(2, dim=-1).values.unbind(-1)
        differs = exact.argmax(-1) != found.argmax(-1)
        other += int(differs.sum())
        near += int((differs & (best - second < FAST_MARGIN * exact.std(-1))).sum())
        chunks = [
            Chunk(tokens=[token], start=chunk.start + len(chunk.tokens), block_table=chunk.block_table)
            for chunk, token in zip(chunks, exact.argmax(-1).tolist(), strict=True)
        ]
    count = len(PROMPTS) * GENERATED
    _require(other == near, f"{other - near} of {count} tokens differ without a near tie")
    return f"{count} tokens, {near} others at near ties"


def check_blocks(subject: Subject) -> str:
    """A sequence goes on in blocks that were copied, that left and came back, and after others were zeroed."""
    subject.reset()
    runner, size = subject.runner, subject.block_size
    tokens = subject.tokens(size + 3)
    subject.step(runner, [Chunk(tokens=tokens, start=0, block_table=[3, 7])])

    def follow(table: list[int]) -> torch.Tensor:
        return subject.step(runner, [Chunk(tokens=[9], start=len(tokens), block_table=table)])

    expected = follow([3, 7])
    runner.copy_blocks([(3, 4), (7, 3), (4, 7)])
    _require(torch.equal(follow([4, 3]), expected), "copied blocks give other logits")
    content = runner.read_blocks([4, 3])
    _require(all(block.device.type == "cpu" for block in content.values()), "blocks were not read to the host")
    runner.zero_blocks([3, 4, 7])
    _require(not any(block.any() for block in runner.read_blocks([3, 4, 7]).values()), "blocks were not zeroed")
    runner.write_blocks([90, 1], content)
    _require(torch.equal(follow([90, 1]), expected), "blocks that came back give other logits")
    return f"{len(content)} pools"


def check_repetition(subject: Subject) -> str:
    """The same step gives the same bits, through the graph and before it."""
    subject.reset()
    tables = subject_tables(subject, [40] * 3)
    for table in tables:
        subject.step(subject.runner, [Chunk(tokens=subject.tokens(30), start=0, block_table=table)])
    chunks = [Chunk(tokens=[5], start=30, block_table=table) for table in tables]
    first = subject.step(subject.runner, chunks)
    _require(all(torch.equal(subject.step(subject.runner, chunks), first) for _ in range(5)), "logits change")
    return "6 times"


CHECKS: dict[str, Check] = {
    "context steps": check_context,
    "generation steps": check_generation,
    "greedy tokens": check_tokens,
    "blocks": check_blocks,
    "repetition": check_repetition,
}


def run_checks(subject: Subject) -> Iterator[tuple[str, bool, str]]:
    """Name, whether it holds, and what was seen, of every check."""
    for name, check in CHECKS.items():
        try:
            yield name, True, check(subject)
        except CheckError as failure:
            yield name, False, str(failure)
        except Exception as error:  # the other checks may still hold
            yield name, False, describe_error(error)


class CheckError(Exception):
    """What was seen instead."""


def _context_steps(subject: Subject) -> Iterator[list[Chunk]]:
    tables = subject_tables(subject, [140, 70, 70])
    long, short, late = subject.tokens(140), subject.tokens(70), subject.tokens(70)
    yield [Chunk(tokens=long[:64], start=0, block_table=tables[0], logits="all")]
    yield [Chunk(tokens=long[64:101], start=64, block_table=tables[0])]
    yield [
        Chunk(tokens=long[101:102], start=101, block_table=tables[0]),
        Chunk(tokens=short[:50], start=0, block_table=tables[1]),
    ]
    yield [
        Chunk(tokens=short[50:60], start=50, block_table=tables[1]),
        Chunk(tokens=late[:33], start=0, block_table=tables[2]),
        Chunk(tokens=long[102:103], start=102, block_table=tables[0]),
    ]


def _generation_steps(subject: Subject) -> Iterator[list[Chunk]]:
    lengths = [63, 7, 64, 1, 100, 30, 65, 12]
    tables = subject_tables(subject, [length + 8 for length in lengths])
    for length, table in zip(lengths, tables, strict=True):
        yield [Chunk(tokens=subject.tokens(length), start=0, block_table=table)]
    for batch in (1, 2, 3, 5, 8, 8, 5, 1):
        yield [Chunk(tokens=subject.tokens(1), start=lengths[i], block_table=tables[i]) for i in range(batch)]
        for i in range(batch):
            lengths[i] += 1


def _judge(subject: Subject, steps: Iterator[list[Chunk]]) -> str:
    subject.reset()
    results = [subject.compare(chunks) for chunks in steps]
    found, rounded = (torch.cat(parts) for parts in zip(*results, strict=True))
    allowed = MOST_ERROR * max(float(rounded.median()), LEAST_ERROR)
    seen = (
        f"{len(found)} rows, median error {float(found.median()):.2e}, {float(rounded.median()):.2e} in declared mode"
    )
    _require(float(found.median()) <= allowed and bool((found <= 16 * max(allowed, float(rounded.max()))).all()), seen)
    return seen


def subject_tables(subject: Subject, lengths: list[int]) -> list[list[int]]:
    """Scattered blocks for sequences of these lengths."""
    order = (1 + torch.randperm(BLOCKS - 1, generator=subject.draw)).tolist()
    return [[order.pop() for _ in range(-(-length // subject.block_size))] for length in lengths]


def _require(holds: bool, seen: str) -> None:
    if not holds:
        raise CheckError(seen)
