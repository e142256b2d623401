"""A request's `retention_…` tensors: how long its cached blocks are worth keeping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.runtime.errors import RequestError
from pipeline.runtime.retention import DEFAULT, Keep, Retention, TokenRange

Tensors = Mapping[str, npt.NDArray[Any]]

STARTS, ENDS = "retention_token_range_starts", "retention_token_range_ends"
PRIORITIES, DURATIONS = "retention_token_range_priorities", "retention_token_range_durations_ms"
ANSWER_PRIORITY, ANSWER_DURATION = "retention_decode_priority", "retention_decode_duration_ms"
TENSORS = (STARTS, ENDS, PRIORITIES, DURATIONS, ANSWER_PRIORITY, ANSWER_DURATION)
# Part of Retention -> the tensor that a client knows it by.
TENSOR_OF = {
    "retention.starts": STARTS,
    "retention.ends": ENDS,
    "retention.priorities": PRIORITIES,
    "retention.durations": DURATIONS,
    "retention.answer_priority": ANSWER_PRIORITY,
    "retention.answer_duration": ANSWER_DURATION,
}
NONE = -1  # an end that is the prompt's, a duration without end


def read_retention(tensors: Tensors, row: int, batch: int) -> Retention | None:
    """Of one row; None where nothing is said. Raises RequestError, which names the tensor."""
    given = {name: _row(name, array, row, batch) for name in TENSORS if (array := tensors.get(name)) is not None}
    if not any(map(len, given.values())):
        return None
    starts = given.pop(STARTS, [])
    answer = Keep(_one(given, ANSWER_PRIORITY, DEFAULT), _seconds(_one(given, ANSWER_DURATION, NONE)))
    ends, priorities = (given.get(name, []) for name in (ENDS, PRIORITIES))
    durations = given.get(DURATIONS) or [NONE] * len(starts)
    for name, values in ((ENDS, ends), (PRIORITIES, priorities), (DURATIONS, durations)):
        if len(values) != len(starts):
            raise RequestError(name, f"holds {len(values)} values, and {STARTS} {len(starts)}")
    ranges = [
        TokenRange(start, None if end == NONE else end, Keep(priority, _seconds(duration)))
        for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
    ]
    return Retention(tuple(ranges), answer)


def _row(name: str, array: npt.NDArray[Any], row: int, batch: int) -> list[int]:
    if array.size % batch:
        raise RequestError(name, f"has the shape {list(array.shape)}, not a row for each of {batch}")
    values: list[int] = np.reshape(array, (batch, array.size // batch))[row].tolist()
    return values


def _one(given: Mapping[str, list[int]], name: str, default: int) -> int:
    values = given.get(name) or [default]
    if len(values) != 1:
        raise RequestError(name, f"holds {len(values)} values", hint="give one for each row")
    return values[0]


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds == NONE else milliseconds * 1e-3
