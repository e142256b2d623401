"""Greedy generation for a fixed batch: what proofs and benchmarks run. Serving schedules in flight instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.runtime.steps import Chunk, plan_step

if TYPE_CHECKING:
    from pipeline.runtime.runner import Runner


@dataclass(slots=True)
class _Sequence:
    """tokens: the prompt, then what was generated. cached: how many of them the pools hold already."""

    tokens: list[int]
    prompt_length: int
    block_table: list[int]
    cached: int = 0
    finished: bool = field(default=False)

    def next_chunk(self, limit: int) -> Chunk:
        """The next tokens to run: a piece of the prompt, or the last token generated."""
        tokens = self.tokens[self.cached : self.cached + limit]
        is_last = self.cached + len(tokens) == len(self.tokens)
        return Chunk(
            tokens=tokens,
            start=self.cached,
            block_table=self.block_table,
            logits="last" if is_last else "none",
        )


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    block_size: int,
    eos_token_ids: Collection[int] = (),
    chunk_tokens: int = 512,
) -> list[list[int]]:
    """The new tokens of each prompt, by argmax; a sequence ends after `max_new_tokens`, or with an end token, which is
    kept. Prompts are prefilled in chunks of at most `chunk_tokens` each, beside others that already generate.

    Allocates the runner's pools anew, for the whole batch at its full length. Raises ValueError for an empty prompt.
    """
    if max_new_tokens < 1 or chunk_tokens < 1 or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts, max_new_tokens and chunk_tokens must not be empty or zero")
    sequences: list[_Sequence] = []
    next_block = 1  # block 0 is padding
    for prompt in prompts:
        count = -(-(len(prompt) + max_new_tokens) // block_size)
        sequences.append(_Sequence(list(prompt), len(prompt), list(range(next_block, next_block + count))))
        next_block += count
    num_blocks = max(next_block, 2)
    runner.allocate(num_blocks)
    while running := [sequence for sequence in sequences if not sequence.finished]:
        chunks = [sequence.next_chunk(chunk_tokens) for sequence in running]
        plan = plan_step(chunks, block_size=block_size, num_blocks=num_blocks)
        best = runner.step(plan.inputs).argmax(dim=-1).tolist()
        for sequence, chunk in zip(running, chunks, strict=True):
            sequence.cached += len(chunk.tokens)
        for token, (owner, _) in zip(best, plan.logit_owner.tolist(), strict=False):  # an unowned row is left over
            sequence = running[owner]
            sequence.tokens.append(token)
            generated = len(sequence.tokens) - sequence.prompt_length
            sequence.finished = generated == max_new_tokens or token in eos_token_ids
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]
