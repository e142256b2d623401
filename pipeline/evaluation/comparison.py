"""Everything that is measured of checkpoints against their original: one core for the verify stage and for `compare`.

Text quality with its worst prompts, drift over long contexts, and tasks; each only where it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import CompatibilityError
from pipeline.evaluation.accuracy import Accuracy, measure_accuracy
from pipeline.evaluation.baseline import make_baseline
from pipeline.evaluation.continuations import continue_worst
from pipeline.evaluation.drift import measure_drift
from pipeline.evaluation.measurement import Measure, find_peaks, measure
from pipeline.evaluation.subject import check_alike
from pipeline.evaluation.tasks import read_tasks
from pipeline.evaluation.windows import cut_windows, read_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.evaluation.schedule import TokenSequence
    from pipeline.evaluation.subject import Subject
    from pipeline.progress import Progress

DRIFT_CHUNK = 512  # tokens of a long context prefilled at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `files`: held-out text; `tokens` of it in windows of `window`, at most `longest` (None: the
    model's context). `lengths`: contexts whose drift is measured, on `texts` texts; none: not measured. `tasks`: JSONL
    files. `continuations`: prompts of `new_tokens` each. `baseline`: whether the held-out text also goes through the
    original rounded to nearest, in the formats of the last checkpoint that has such a baseline. `settings` are what
    messages call these."""

    files: Sequence[Path]
    tokens: int
    window: int
    longest: int | None = None
    lengths: Sequence[int] = ()
    texts: int = 1
    tasks: Sequence[Path] = ()
    continuations: int = 0
    new_tokens: int = 32
    baseline: bool = True
    settings: dict[str, str] = field(default_factory=lambda: {"files": "--text", "tasks": "--tasks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Per checkpoint, the original first; empty where not asked for. `samples`: the worst prompts of all.
    `baseline`: the text quality of rounding to nearest, None where that is no other checkpoint."""

    sizes: list[int]
    quality: list[Measure]
    drift: list[list[dict[str, Any]]]
    accuracy: list[Accuracy]
    samples: list[dict[str, Any]]
    baseline: Measure | None = None

    def to_json(self) -> dict[str, Any]:
        """`baseline_share` of a row: its loss in nats per token over the original, as a share of the baseline's."""
        rows = []
        for i, each in enumerate(self.quality):
            row = {**self._describe(each), "bytes": self.sizes[i]}
            row["context"] = self.drift[i] if self.drift else []
            row["accuracy"] = self.accuracy[i].to_json() if self.accuracy else None
            rows.append(row)
        baseline = self._describe(self.baseline) if self.baseline else None
        return {"checkpoints": rows, "baseline": baseline, "samples": self.samples}

    def _describe(self, measure: Measure) -> dict[str, Any]:
        ratio, share = measure.tally.perplexity / self.quality[0].tally.perplexity, None
        if self.baseline is not None and (whole := self._lose(self.baseline)) > 0:
            share = self._lose(measure) / whole
        return {**measure.to_json(), "perplexity_ratio": ratio, "baseline_share": share}

    def _lose(self, measure: Measure) -> float:
        return measure.tally.mean("nll") - self.quality[0].tally.mean("nll")


def compare_subjects(
    subjects: Sequence[Subject], plan: Plan, progress: Progress, *, folder: Path | None = None
) -> Comparison:
    """`folder`: where large activations may go meanwhile. Raises CompatibilityError for checkpoints of several models,
    and what reading the text and the tasks raises."""
    check_alike(subjects)
    items = read_tasks(plan.tasks, setting=plan.settings["tasks"]) if plan.tasks else []
    tokens = read_tokens(subjects[0].tokenizer, plan.files, setting=plan.settings["files"])
    origin = ", ".join(map(str, plan.files))
    _check_lengths(subjects[0], plan.lengths)
    windows = _cut(subjects[0], tokens, plan, origin, progress)
    others = subjects[:0:-1] if plan.baseline else ()
    baselines = (make_baseline(subjects[0], other) for other in others)
    baseline = next(filter(None, baselines), None)
    measured = [*subjects, baseline] if baseline else list(subjects)
    found = measure(measured, windows, progress, folder=folder)
    quality = found[: len(subjects)]
    peaks = find_peaks(quality[1:], plan.continuations)
    samples = continue_worst(subjects, windows, peaks, plan.new_tokens, progress)
    drift: list[list[dict[str, Any]]] = []
    if plan.lengths:
        drift = measure_drift(
            subjects,
            tokens,
            plan.lengths,
            progress,
            texts=plan.texts,
            origin=origin,
            folder=folder,
            chunk=DRIFT_CHUNK,
        )
    accuracy = measure_accuracy(subjects, items, progress, folder=folder) if items else []
    sizes = [subject.nbytes for subject in subjects]
    return Comparison(
        sizes=sizes,
        quality=quality,
        drift=drift,
        accuracy=accuracy,
        samples=samples,
        baseline=found[-1] if baseline else None,
    )


def _cut(subject: Subject, tokens: Sequence[int], plan: Plan, origin: str, progress: Progress) -> list[TokenSequence]:
    """The windows to score. What was asked for and cannot be had is noted."""
    window = min(plan.window, plan.longest or subject.architecture.context_limit)
    if window < plan.window:
        progress.note(f"windows of {window} tokens, the longest context here; {plan.window} were asked for")
    windows = cut_windows(tokens, total=plan.tokens, window=window, origin=origin, first=subject.begin)
    if len(windows) < plan.tokens // window:
        progress.note(
            f"{len(windows)} windows of {window} tokens are scored, {plan.tokens} tokens were asked for: {origin} "
            f"holds {len(tokens)}"
        )
    return windows


def _check_lengths(subject: Subject, lengths: Sequence[int]) -> None:
    limit = subject.architecture.context_limit
    if lengths and max(lengths) > limit:
        raise CompatibilityError(
            f"a context of {max(lengths)} tokens is more than the model's {limit}", hint="take shorter context lengths"
        )
