"""Greedy continuations, by the whole network in exact arithmetic: the same tokens in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.forward import RESIDENT_BYTES, read_program

if TYPE_CHECKING:
    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress

BLOCK_SIZE = 64
BATCH = 8  # prompts at once


def generate_greedily(
    subject: Subject, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress
) -> list[list[int]]:
    """The next `max_new_tokens` tokens of each prompt, fewer where the model ends its text.

    Weights beyond what the interpreter keeps are prepared again at each token: slow for a large model, never large.
    """
    from pipeline.runtime.generation import generate
    from pipeline.runtime.runner import InterpreterRunner

    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    program = read_program(subject.source, subject.architecture, subject.network(longest, BLOCK_SIZE))
    runner = InterpreterRunner(program, mode="exact", resident_bytes=RESIDENT_BYTES)
    end = subject.folder.config.get("eos_token_id")
    ends = end if isinstance(end, list) else [end] if isinstance(end, int) else []
    continuations: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        continuations += generate(runner, batch, max_new_tokens, block_size=BLOCK_SIZE, eos_token_ids=ends)
        progress.advance(len(batch))
    return continuations


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two texts or continuations begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
