"""A query to the emitted models: what it may hold, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_repo.trtseek_parameters import RETURN_IDS
from pipeline.runtime.errors import ServingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TEXT_MODEL, TOKEN_MODEL = "tensorrt_llm_bls", "tensorrt_llm"
# Option of a query -> tensor of the text model, of the token model, their type.
OPTIONS: dict[str, tuple[str, str, str]] = {
    "max_tokens": ("max_tokens", "request_output_len", "INT32"),
    "temperature": ("temperature", "temperature", "FP32"),
    "top_k": ("top_k", "runtime_top_k", "INT32"),
    "top_p": ("top_p", "runtime_top_p", "FP32"),
    "seed": ("seed", "seed", "UINT64"),
    "min_tokens": ("min_tokens", "min_tokens", "INT32"),
    "repetition_penalty": ("repetition_penalty", "repetition_penalty", "FP32"),
    "presence_penalty": ("presence_penalty", "presence_penalty", "FP32"),
    "frequency_penalty": ("frequency_penalty", "frequency_penalty", "FP32"),
    "end_id": ("end_id", "end_id", "INT32"),
    "return_log_probs": ("return_log_probs", "return_log_probs", "BOOL"),
}
NUMPY = {"INT32": "int32", "UINT64": "uint64", "FP32": "float32", "BOOL": "bool"}
LARGEST_FP32 = 3.4e38
# Parameters of Triton's protocol that are not a request's to say, as tritonclient has it, and how the others begin.
RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output", "triton_")
PARAMETERS = 'what is no tensor stands apart: "parameters": {"priority_class": "P0", "timeout_ms": 500}'
# Type of a tensor -> what a value of it is, and the values it holds.
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "INT32": ("a whole number of 32 bits", lambda value: type(value) is int and -(2**31) <= value < 2**31),
    "UINT64": ("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**64),
    "FP32": ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= LARGEST_FP32),
    "BOOL": ("true or false", lambda value: type(value) is bool),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One of `text`, `messages` and `input_ids`; `options` by the names in OPTIONS; `stop`: strings, for text only.

    stream: tokens come as they are made. ids: an answer in text has its tokens' ids, too. parameters: of Triton's
    protocol (`priority_class`, `timeout_ms`, …).
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    input_ids: Sequence[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stream: bool = True
    ids: bool = False
    parameters: Mapping[str, str | int] = field(default_factory=dict)
    request_id: str = ""

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.text, self.messages, self.input_ids)) != 1:
            raise ServingError("a query has one of text, messages and input_ids")
        if unknown := self.options.keys() - OPTIONS:
            raise ServingError(
                f"unknown options {', '.join(sorted(unknown))}", hint=f"known: {', '.join(OPTIONS)}; {PARAMETERS}"
            )
        for problem in self._find_wrong_types():
            raise ServingError(problem)
        if self.stop and self.input_ids is not None:
            raise ServingError("stop strings need text", hint="they are looked for in text, and input_ids give tokens")

    def _find_wrong_types(self) -> Iterator[str]:
        """A query may come from a file of somebody's."""
        is_int32 = VALUES["INT32"][1]
        if self.text is not None and not isinstance(self.text, str):
            yield f"the text is {self.text!r}, not text"
        if self.input_ids is not None and not (_is_list(self.input_ids) and all(map(is_int32, self.input_ids))):
            yield f"input_ids are {self.input_ids!r}, not a list of whole numbers of 32 bits"
        if self.messages is not None and not (
            _is_list(self.messages) and all(isinstance(message, Mapping) for message in self.messages)
        ):
            yield f"messages are {self.messages!r}, not a list of objects"
        if not (_is_list(self.stop) and all(isinstance(text, str) for text in self.stop)):
            yield f"stop is {self.stop!r}, not a list of texts"
        if not isinstance(self.parameters, Mapping):
            yield f"parameters are {self.parameters!r}, not an object"
            return
        for name, value in self.parameters.items():
            if not isinstance(name, str) or name in RESERVED or name.startswith(RESERVED[-1]):
                yield f"the parameter {name!r} is Triton's own"
            if not _is_parameter(value):
                yield f"the parameter {name} is {value!r}, not text, true, false or a number"
        if not all(map(_is_encodable, (self.text or "", *self.stop, _write(self.messages or ())))):
            yield "the query holds bytes that are not UTF-8"
        for name, value in self.options.items():
            meaning, fits = VALUES[OPTIONS[name][2]]
            if not fits(value):
                yield f"{name} is {value!r}, not {meaning}"

    @property
    def model(self) -> str:
        return TEXT_MODEL if self.input_ids is None else TOKEN_MODEL


def build_parameters(query: Query) -> dict[str, str | int]:
    """Of Triton's protocol."""
    return {**query.parameters, **({RETURN_IDS: True} if query.ids and query.model == TEXT_MODEL else {})}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_parameter(value: object) -> bool:
    """Whether Triton's protocol can carry it."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return (isinstance(value, str) and _is_encodable(value)) or isinstance(value, float)


def _is_encodable(text: str) -> bool:
    """What came from a terminal or a pipe in another encoding is not: Python keeps its bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(messages), ensure_ascii=False)


def build_inputs(query: Query) -> list[Any]:
    """A query as tritonclient's inputs."""
    import numpy as np

    tensors: dict[str, tuple[Any, str]] = {}
    for name, value in query.options.items():
        text_name, token_name, kind = OPTIONS[name]
        target = token_name if query.model == TOKEN_MODEL else text_name
        tensors[target] = (np.array([[value]], NUMPY[kind]), kind)
    if query.input_ids is not None:
        tensors["input_ids"] = (np.array([list(query.input_ids)], np.int32), "INT32")
        tensors["input_lengths"] = (np.array([[len(query.input_ids)]], np.int32), "INT32")
    elif query.text is not None:
        tensors["text_input"] = (_strings(query.text), "BYTES")
    else:
        tensors["messages"] = (_strings(_write(query.messages or ())), "BYTES")
    if query.stop:
        tensors["stop_words"] = (_strings(*query.stop), "BYTES")
    flags = {
        "streaming" if query.model == TOKEN_MODEL else "stream": query.stream,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    tensors |= {name: (np.array([[value]]), "BOOL") for name, value in flags.items()}
    return [_make_input(name, array, kind) for name, (array, kind) in tensors.items()]


def _make_input(name: str, array: npt.NDArray[Any], kind: str) -> Any:
    from tritonclient.grpc import InferInput

    tensor = InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _strings(*texts: str) -> npt.NDArray[np.object_]:
    import numpy as np

    return np.array([[text.encode() for text in texts]], np.object_)
