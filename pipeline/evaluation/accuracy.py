"""The share of tasks that each checkpoint solves.

Choices are scored like text: prompt and choice as one sequence, all checkpoints in lockstep, one layer in memory at a
time; a choice's score is the sum of the log-probabilities of its own tokens, as lm-evaluation-harness has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.text import load_tokenizer
from pipeline.evaluation.greedy import count_shared, generate_greedily
from pipeline.evaluation.measurement import BLOCK_SIZE, plan_schedule, run_lockstep
from pipeline.evaluation.schedule import TokenSequence
from pipeline.evaluation.tasks import Choice, Exact, Item

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from tokenizers import Tokenizer

    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """`solved[i]`: whether item i was. `normalised`: the same, by mean log-likelihood per token for choices."""

    label: str
    items: tuple[Item, ...]
    solved: tuple[bool, ...]
    normalised: tuple[bool, ...]

    @property
    def share(self) -> float:
        return sum(self.solved) / len(self.items)

    def to_json(self) -> dict[str, Any]:
        tasks: dict[str, dict[str, Any]] = {}
        for item, solved, normalised in zip(self.items, self.solved, self.normalised, strict=True):
            row = tasks.setdefault(item.task, {"items": 0, "solved": 0, "normalised": 0})
            row["items"] += 1
            row["solved"] += solved
            row["normalised"] += normalised
        for row in tasks.values():
            row |= {"accuracy": row["solved"] / row["items"], "accuracy_normalised": row["normalised"] / row["items"]}
        return {"items": len(self.items), "accuracy": self.share, "tasks": tasks}


def measure_accuracy(
    subjects: Sequence[Subject], items: Sequence[Item], progress: Progress, *, folder: Path | None = None
) -> list[Accuracy]:
    """Per checkpoint. Prompts are read by the first checkpoint's tokenizer."""
    tokenizer, begin = load_tokenizer(subjects[0].tokenizer), subjects[0].begin
    choices = [item for item in items if isinstance(item, Choice)]
    exact = [item for item in items if isinstance(item, Exact)]
    scores: list[list[tuple[bool, bool]]] = [[] for _ in subjects]
    if choices:
        scores = _score_choices(subjects, choices, tokenizer, begin, progress, folder)
    results = []
    if exact:
        progress.start("exact match", len(subjects) * len(exact), "prompts")
    for subject, scored in zip(subjects, scores, strict=True):
        matched = iter(_match(subject, exact, tokenizer, begin, progress) if exact else [])
        chosen = iter(scored)
        pairs = [next(chosen) if isinstance(item, Choice) else (next(matched),) * 2 for item in items]
        solved, normalised = zip(*pairs, strict=True)
        results.append(Accuracy(label=subject.label, items=tuple(items), solved=solved, normalised=normalised))
    return results


def _score_choices(
    subjects: Sequence[Subject],
    items: Sequence[Choice],
    tokenizer: Tokenizer,
    begin: list[int],
    progress: Progress,
    folder: Path | None,
) -> list[list[tuple[bool, bool]]]:
    """Per checkpoint and item, whether the right choice has the highest sum, and the highest mean."""
    import torch

    spans: list[tuple[int, int]] = []  # (sequence's item, where its choice's tokens begin)
    sequences = []
    for place, item in enumerate(items):
        prompt = tokenizer.encode(item.prompt, add_special_tokens=False).ids
        for choice in item.choices:
            whole = tokenizer.encode(item.prompt + choice, add_special_tokens=False).ids
            # A token may reach across the end of the prompt: then it is the choice's.
            shared = count_shared(prompt, whole[:-1])
            sequences.append(TokenSequence(tokens=(*begin, *whole)))
            spans.append((place, max(len(begin) + shared, 1)))
    starts = torch.tensor([start for _, start in spans])
    sums = torch.zeros(len(subjects), len(sequences), dtype=torch.float64)
    schedule = plan_schedule(sequences, subjects[0].architecture, block_size=BLOCK_SIZE)
    layers = subjects[0].architecture.num_layers
    progress.start("multiple choice", sum(len(s.tokens) for s in sequences) * (layers + 1), "token layers")
    for events in run_lockstep(subjects, schedule, block_size=BLOCK_SIZE, folder=folder):
        progress.advance(len(events[0].rows))
        if events[0].layer is not None:
            continue
        following = schedule.steps[events[0].step].next_tokens(sequences)
        counted = following.places + 1 >= starts[following.owners]
        rows, targets, owners = following.rows[counted], following.targets[counted], following.owners[counted]
        for i, event in enumerate(events):
            log_p = torch.log_softmax(event.rows[rows].float(), -1).gather(-1, targets[:, None])[:, 0]
            sums[i].index_add_(0, owners, log_p.double())
    lengths = torch.tensor([len(s.tokens) for s in sequences]) - starts
    return [_judge(items, spans, each, each / lengths) for each in sums]


def _judge(
    items: Sequence[Choice], spans: Sequence[tuple[int, int]], sums: torch.Tensor, means: torch.Tensor
) -> list[tuple[bool, bool]]:
    owners = [owner for owner, _ in spans]
    judged = []
    for place, item in enumerate(items):
        mine = [i for i, owner in enumerate(owners) if owner == place]
        judged.append((_is_best(sums[mine], item.answer), _is_best(means[mine], item.answer)))
    return judged


def _is_best(values: torch.Tensor, place: int) -> bool:
    """Whether value `place` is larger than every other; a tie, or a value that is not finite, is no answer."""
    return sum(bool(values[place] > value) for i, value in enumerate(values) if i != place) == len(values) - 1


def _match(
    subject: Subject, items: Sequence[Exact], tokenizer: Tokenizer, begin: list[int], progress: Progress
) -> list[bool]:
    prompts = [begin + tokenizer.encode(item.prompt, add_special_tokens=False).ids for item in items]
    longest = max(item.max_tokens for item in items)
    answers = generate_greedily(subject, prompts, longest, progress)
    pairs = zip(items, answers, strict=True)
    return [
        tokenizer.decode(tokens[: item.max_tokens]).strip().startswith(item.answer.strip()) for item, tokens in pairs
    ]
