"""Tasks that a checkpoint solves or not, from a JSONL file: one JSON object per line.

    {"prompt": "The capital of France is", "choices": [" Paris", " Lyon"], "answer": 0}
    {"prompt": "def add(a, b):\\n    return", "answer": " a + b", "max_tokens": 8}

With `choices` it is multiple choice: `answer` is the place of the right one, the one with the highest summed
log-likelihood after the prompt is chosen (and, reported beside it, the one with the highest mean per token). Without,
it is exact match: the greedy continuation of at most `max_tokens` tokens (default: 16) must begin with `answer`, white
space at its start and end aside. `task` names a group to report apart, `id` the line in messages; both are optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, spell_reason

KEYS = {"prompt", "choices", "answer", "max_tokens", "task", "id"}
DEFAULT_TASK = {True: "choice", False: "exact match"}
DEFAULT_MAX_TOKENS = 16
LIMIT = 1 << 20  # characters of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Multiple choice: `answer` is the place of the right one among `choices`."""

    name: str
    task: str
    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A continuation that must begin with `answer`."""

    name: str
    task: str
    prompt: str
    answer: str
    max_tokens: int


Item = Choice | Exact


def read_tasks(files: Sequence[Path], *, setting: str) -> list[Item]:
    """Raises ConfigError, naming file and line, for what is not such a line; and for a file without any."""
    items = []
    for path in files:
        found = list(_read_file(path, setting))
        if not found:
            raise ConfigError(f"{path} holds no task", hint=f"{setting} names JSONL files, one task a line")
        items += found
    return items


def _read_file(path: Path, setting: str) -> Iterator[Item]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {spell_reason(error)}", hint=f"{setting} names JSONL files, UTF-8") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{path}:{number}")


def _parse(line: str, place: str) -> Item:
    try:
        record = json.loads(line) if len(line) <= LIMIT else None
    except (ValueError, RecursionError) as error:
        raise _refuse(place, f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _refuse(place, "is not a JSON object" if len(line) <= LIMIT else f"is longer than {LIMIT} characters")
    if unknown := sorted(record.keys() - KEYS):
        raise _refuse(place, f"has the unknown key {unknown[0]!r}")
    prompt, name = record.get("prompt"), str(record.get("id", place))
    if not isinstance(prompt, str) or not prompt:
        raise _refuse(place, "has no prompt")
    task = record.get("task", DEFAULT_TASK["choices" in record])
    if not isinstance(task, str):
        raise _refuse(place, "has a task that is no text")
    if "choices" in record:
        return _parse_choice(record, place, name, task)
    answer, limit = record.get("answer"), record.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(answer, str) or not answer.strip():
        raise _refuse(place, "has no answer; without choices it must be text")
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= 1024:
        raise _refuse(place, f"has max_tokens {limit!r}, not a number from 1 to 1024")
    return Exact(name=name, task=task, prompt=prompt, answer=answer, max_tokens=limit)


def _parse_choice(record: dict[str, Any], place: str, name: str, task: str) -> Choice:
    choices, answer = record["choices"], record.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise _refuse(place, "has choices that are not two or more texts")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise _refuse(place, f"has answer {answer!r}, not a place from 0 to {len(choices) - 1}")
    return Choice(name=name, task=task, prompt=record["prompt"], choices=tuple(choices), answer=answer)


def _refuse(place: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{place} {problem}",
        hint='lines look like {"prompt": "…", "choices": ["…", "…"], "answer": 0} or {"prompt": "…", "answer": "…"}',
    )
