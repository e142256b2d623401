"""How quantization's cost grows with the context: entropy and KL by distance from the start, on texts as long as the
longest length asked for. RoPE scaled beyond its original context, errors that add up in the cache and attention over
thousands of keys show here and nowhere in windows of a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import QuantizationError
from pipeline.evaluation.measurement import measure
from pipeline.evaluation.windows import cut_windows

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress


def measure_drift(
    subjects: Sequence[Subject],
    tokens: Sequence[int],
    lengths: Sequence[int],
    progress: Progress,
    *,
    texts: int = 1,
    origin: str,
    folder: Path | None = None,
    chunk: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Per checkpoint, a row for each of `lengths` (ascending): the means over the positions between the length before
    and it. Raises QuantizationError where the text is shorter than the longest length."""
    ends = sorted(set(lengths))
    begin = subjects[0].begin
    if len(tokens) + len(begin) < ends[-1]:
        raise QuantizationError(
            f"{origin}: {len(tokens)} tokens of held-out text, fewer than one context of {ends[-1]}",
            hint="name more text, or take shorter context lengths",
        )
    windows = cut_windows(tokens, total=texts * ends[-1], window=ends[-1], origin=origin, first=begin)
    measures = measure(
        subjects, windows, progress, edges=ends, by_layer=False, folder=folder, chunk=chunk, item="long context"
    )
    return [
        [
            {"length": row["last"], **{k: row[k] for k in ("tokens", "nll", "entropy", "kl", "top1", "top5")}}
            for row in each.tally.buckets()
        ]
        for each in measures
    ]
