"""The worst prompts side by side: what each checkpoint goes on to say from where they disagree most.

A prompt is held-out text up to the position with the largest KL divergence of its window, whichever checkpoint's, so
that the first token generated is the one that quantization moved furthest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.text import load_tokenizer
from pipeline.evaluation.greedy import count_shared, generate_greedily

if TYPE_CHECKING:
    from pipeline.evaluation.measurement import Peak
    from pipeline.evaluation.schedule import TokenSequence
    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress

PROMPT_TOKENS = 64  # of the text before the position, at most


def continue_worst(
    subjects: Sequence[Subject],
    sequences: Sequence[TokenSequence],
    peaks: Sequence[Peak],
    tokens: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """A record per peak: the prompt, KL there and which checkpoint's, and per checkpoint its text, what of that agrees
    with the original's, and the place of the first other token (None: they agree to the end)."""
    if not peaks:
        return []
    tokenizer = load_tokenizer(subjects[0].tokenizer)
    begin = tuple(subjects[0].begin)
    prompts = []
    for peak in peaks:
        text = sequences[peak.sequence].tokens[len(begin) : peak.place + 1]
        prompts.append(begin + text[-PROMPT_TOKENS:])
    progress.start("continuations", len(prompts) * len(subjects), "prompts")
    answers = [generate_greedily(subject, prompts, tokens, progress) for subject in subjects]
    records = []
    for i, peak in enumerate(peaks):
        original = answers[0][i]
        versions = []
        for subject, answer in zip(subjects, answers, strict=True):
            shared = count_shared(original, answer[i])
            first = None if shared == len(original) == len(answer[i]) else shared
            agreed = tokenizer.decode(answer[i][:first], skip_special_tokens=False)
            whole = tokenizer.decode(answer[i], skip_special_tokens=False)
            # Bytes of one character may be several tokens: what is decoded apart need not begin the whole.
            agreed = whole[: count_shared(agreed, whole)]
            versions.append({"label": subject.label, "text": whole, "agreed": agreed, "first_difference": first})
        prompt = tokenizer.decode(prompts[i])
        records.append({"prompt": prompt, "kl": peak.kl, "checkpoint": peak.label, "continuations": versions})
    return records
