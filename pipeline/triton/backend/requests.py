"""The tensors of a `tensorrt_llm` request as the executor's requests, one for each row of its batch.

Tensors and their meanings are TensorRT-LLM 1.2's (request_tensors.py). What is declared for its clients' sake and means
nothing here is refused by name where it holds anything, so that nobody believes it was used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model_repo.trtseek_parameters import ParameterError, check_parameters
from pipeline.runtime.errors import RequestError
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.sampling import Sampling
from pipeline.triton.backend.request_tensors import (
    IGNORED,
    REFUSED,
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    SERVED,
    TENSOR_OF,
)
from pipeline.triton.backend.retention import read_retention

Tensors = Mapping[str, npt.NDArray[Any]]
LONGEST_MS = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a client asks to be told beside tokens."""

    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool


def is_stop(tensors: Tensors) -> bool:
    """Whether the request is to end another of the same id."""
    return bool(_first(tensors, "stop", False))


def read_wanted(tensors: Tensors) -> Wanted:
    names = ("perf_metrics", "num_input_tokens", "num_output_tokens")
    return Wanted(**{name: bool(_first(tensors, f"return_{name}", False)) for name in names})


def read_requests(
    tensors: Tensors, *, request_id: str, vocab_size: int, parameters: Mapping[str, Any], timeout_us: int = 0
) -> list[Request]:
    """One request for each row. `parameters` and `timeout_us` are the protocol's: `priority_class` (0 to 2, or "P0" to
    "P2"), `timeout_ms`, `queue_timeout_ms`, `cache_salt`, `min_p`; Triton's own timeout limits the time in the queue.

    Raises RequestError, which names the tensor.
    """
    _refuse_unserved(tensors)
    try:
        check_parameters(parameters, "tensorrt_llm", SERVED)
    except ParameterError as error:
        raise RequestError(error.name, error.problem, hint=error.hint) from None
    lengths = _require(tensors, "input_lengths").reshape(-1)
    ids = _require(tensors, "input_ids")
    _require(tensors, "request_output_len")
    batch = len(lengths)
    if ids.ndim != 2 or len(ids) != batch:
        raise RequestError("input_ids", f"has the shape {list(ids.shape)}, and input_lengths {batch} rows")
    extra = _read_parameters(parameters, timeout_us)
    min_p = extra.pop("min_p", 0.0)
    requests = []
    for row in range(batch):
        length = int(lengths[row])
        if not 0 < length <= ids.shape[1]:
            raise RequestError("input_lengths", f"is {length}, and input_ids has {ids.shape[1]} columns")
        try:
            sampling = Sampling(
                **_read_row(tensors, SAMPLING_FIELDS, row, batch),
                bad_words=_read_words(tensors, "bad_words_list", row, batch),
                embedding_bias=_read_bias(tensors, row, vocab_size),
                min_p=min_p,
            )
            request = Request(
                input_ids=tuple(ids[row, :length].tolist()),
                request_id=request_id if batch == 1 else f"{request_id}#{row}" if request_id else "",
                sampling=sampling,
                stop_words=_read_words(tensors, "stop_words_list", row, batch),
                retention=read_retention(tensors, row, batch),
                **_read_row(tensors, REQUEST_FIELDS, row, batch),
                **extra,
            )
        except RequestError as error:
            raise name_tensor(error) from None
        requests.append(request)
    return requests


def name_tensor(error: RequestError) -> RequestError:
    """The same error, said of the tensor instead of the executor's field."""
    tensor = TENSOR_OF.get(error.field, error.field)
    return RequestError(tensor, error.message.removeprefix(error.field).lstrip(), hint=error.hint)


def _refuse_unserved(tensors: Tensors) -> None:
    for name, array in tensors.items():
        if name not in SERVED and name not in IGNORED and array.size:
            purpose = REFUSED.get(name)
            problem = f"is for {purpose}, which is not served" if purpose else "is not an input of tensorrt_llm"
            raise RequestError(name, problem, hint="leave the tensor out")


def _read_row(tensors: Tensors, fields: Mapping[str, tuple[str, type]], row: int, batch: int) -> dict[str, Any]:
    values = {}
    for tensor, (field, kind) in fields.items():
        if (array := tensors.get(tensor)) is not None:
            flat = array.reshape(-1)
            if len(flat) != batch:
                raise RequestError(field, f"has the shape {list(array.shape)}, not one value for each of {batch} rows")
            values[field] = kind(flat[row])
    return values


def _read_words(tensors: Tensors, name: str, row: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """A word list [batch, 2, L]: row 0 all ids one after another, row 1 where each word ends in it, padded with -1."""
    array = tensors.get(name)
    if array is None or not array.size:
        return ()
    if array.ndim != 3 or array.shape[:2] != (batch, 2):
        raise RequestError(name, f"has the shape {list(array.shape)}, not [{batch}, 2, length]")
    flat, ends = array[row].tolist()
    ends = [end for end in ends if end >= 0]
    if any(end > len(flat) or end <= start for start, end in zip([0, *ends], ends, strict=False)):
        raise RequestError(name, f"ends its words at {ends}, among {len(flat)} ids")
    return tuple(tuple(flat[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def _read_bias(tensors: Tensors, row: int, vocab_size: int) -> npt.NDArray[np.float32] | None:
    """A tokenizer may know fewer ids than the network's logits have columns: the rest is not biased."""
    array = tensors.get("embedding_bias")
    if array is None or not array.size:
        return None
    bias = np.asarray(array.reshape(len(array), -1)[row], np.float32)
    return np.pad(bias, (0, vocab_size - len(bias))) if len(bias) < vocab_size else bias


def _read_parameters(parameters: Mapping[str, Any], timeout_us: int) -> dict[str, Any]:
    """Fields of Request from what the protocol carries beside tensors."""
    values: dict[str, Any] = {}
    if "priority_class" in parameters:
        name = str(given := parameters["priority_class"])
        by_name = {spelling: priority for priority in Priority for spelling in (priority.name, str(int(priority)))}
        if name not in by_name:
            raise RequestError("priority_class", f"is {given!r}", hint="P0, P1 or P2, or 0, 1 or 2; P0 comes first")
        values["priority"] = by_name[name]
    for parameter, field, scale, unit in (
        ("timeout_ms", "timeout", 1e-3, "a number of milliseconds, from 0"),
        ("queue_timeout_ms", "queue_timeout", 1e-3, "a number of milliseconds, from 0"),
        ("min_p", "min_p", 1.0, "a number"),
    ):
        if parameter in parameters:
            values[field] = _read_number(parameter, parameters[parameter], unit) * scale
    if timeout_us:
        values.setdefault("queue_timeout", timeout_us * 1e-6)
    if "cache_salt" in parameters:
        values["cache_salt"] = str(parameters["cache_salt"])
    return values


def _read_number(name: str, value: Any, meaning: str) -> float:
    """A parameter's, which text may hold too. Seconds are no client's: what is wrong with its milliseconds is said of
    them."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or not 0 <= number <= LONGEST_MS:
        raise RequestError(name, f"is {value!r}", hint=f"give {meaning}")
    return number


def _require(tensors: Tensors, name: str) -> npt.NDArray[Any]:
    if name not in tensors:
        raise RequestError(name, "is missing")
    return tensors[name]


def _first(tensors: Tensors, name: str, default: Any) -> Any:
    array = tensors.get(name)
    return default if array is None or not array.size else array.reshape(-1)[0]
