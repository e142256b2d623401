"""A text request, as `tensorrt_llm_bls` takes it, to a request for `tensorrt_llm`: prompts, words, tensor names.

Copied into the version folder of `tensorrt_llm_bls`. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from trtseek_parameters import RETURN_IDS, read_choice
from trtseek_text import RequestError, Tokenizer, check_sizes, encode_bias, encode_words

Arrays = dict[str, npt.NDArray[Any]]

# Text request's tensor -> tensor of `tensorrt_llm`, where one is passed on as it is.
PASSED_ON = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    **{
        name: name
        for name in (
            "beam_width",
            "frequency_penalty",
            "min_tokens",
            "num_return_sequences",
            "presence_penalty",
            "repetition_penalty",
            "return_context_logits",
            "return_generation_logits",
            "return_log_probs",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "return_perf_metrics",
            "seed",
            "temperature",
        )
    },
}
READ_HERE = (
    "bad_words",
    "embedding_bias_weights",
    "embedding_bias_words",
    "end_id",
    "exclude_input_in_output",
    "messages",
    "pad_id",
    "stop_words",
    "stream",
    "text_input",
)
SERVED = (*READ_HERE, *PASSED_ON)
TEXTS = ("text_input", "messages", "stop_words", "bad_words", "embedding_bias_words")


@dataclass(frozen=True)
class Prompt:
    """One row of a request. text: what came, or the chat template's rendering. stops: strings that end the answer.
    repeats: the answer begins with the prompt. wanted: outputs beside the text. sequences: answers to it."""

    text: str
    ids: list[int]
    stops: tuple[str, ...]
    streams: bool
    repeats: bool
    wanted: tuple[str, ...]
    sequences: int = 1


def read_prompts(
    tokenizer: Tokenizer, inputs: Arrays, *, max_bytes: int, parameters: Mapping[str, Any]
) -> list[Prompt]:
    """One for each row. `parameters`: the protocol's. Raises RequestError, which names the tensor; for texts of more
    than `max_bytes` too. Raises ParameterError."""
    if unserved := sorted(name for name, array in inputs.items() if array.size and name not in SERVED):
        raise RequestError(f"{', '.join(unserved)}: not served; this model takes text only")
    given = [name for name in ("text_input", "messages") if name in inputs]
    if len(given) != 1:
        raise RequestError("give either text_input or messages")
    if "max_tokens" not in inputs:
        raise RequestError("max_tokens: is missing")
    check_sizes(inputs, TEXTS, max_bytes)
    returned = ("output_ids",) if read_choice(parameters, RETURN_IDS) else ()
    texts = inputs[given[0]].reshape(-1)
    stops = _read_strings(inputs, "stop_words", len(texts))
    prompts = []
    for row, text in enumerate(texts):
        if given[0] == "messages":
            rendered = tokenizer.render_chat(text)
            ids = tokenizer.encode_word(rendered.encode())
        else:
            ids = tokenizer.encode_prompt(text)
            rendered = text.decode()
        streams = _flag(inputs, "stream", row)
        prompts.append(
            Prompt(
                text=rendered,
                ids=ids,
                stops=stops[row],
                streams=streams,
                repeats=not streams and given[0] == "text_input" and not _flag(inputs, "exclude_input_in_output", row),
                wanted=(
                    *returned,
                    *(output for name, outputs in OUTPUTS_OF.items() if _flag(inputs, name, row) for output in outputs),
                ),
                sequences=_count_sequences(inputs, row),
            )
        )
    return prompts


OUTPUTS_OF = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_perf_metrics": (
        "kv_cache_alloc_new_blocks",
        "kv_cache_reused_blocks",
        "kv_cache_alloc_total_blocks",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "acceptance_rate",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    ),
}


def build_inputs(tokenizer: Tokenizer, inputs: Arrays, prompt: Prompt, *, row: int, rows: int) -> Arrays:
    """The tensors of a request to `tensorrt_llm` for one row, the batch first.

    Stop strings are looked for in the text, where they are found whatever tokens make them; only special tokens, which
    text does not show, go along as tokens.
    """
    arrays = {
        target: _row(inputs[name], row, rows).reshape(1, 1) for name, target in PASSED_ON.items() if name in inputs
    }
    for name, default in (("end_id", tokenizer.end_id), ("pad_id", tokenizer.pad_id)):
        given = inputs.get(name)
        arrays[name] = np.array([[default]], np.int32) if given is None else _row(given, row, rows).reshape(1, 1)
    special = [stop.encode() for stop in prompt.stops if tokenizer.is_special(stop)]
    words = {
        "stop_words_list": np.array([special], np.object_) if special else None,
        "bad_words_list": _row(inputs["bad_words"], row, rows).reshape(1, -1) if "bad_words" in inputs else None,
    }
    for name, listed in words.items():
        if listed is not None:
            arrays[name] = encode_words(tokenizer, listed, 1)
    if "embedding_bias_words" in inputs or "embedding_bias_weights" in inputs:
        both = [
            None if name not in inputs else _row(inputs[name], row, rows).reshape(1, -1)
            for name in ("embedding_bias_words", "embedding_bias_weights")
        ]
        arrays["embedding_bias"] = encode_bias(tokenizer, both[0], both[1], 1)
    return {
        **arrays,
        "input_ids": np.array([prompt.ids], np.int32),
        "input_lengths": np.array([[len(prompt.ids)]], np.int32),
        # Whoever waits for a stop string has to see the text as it comes.
        "streaming": np.array([[prompt.streams or bool(prompt.stops)]]),
        "exclude_input_in_output": np.array([[True]]),
    }


def rename_fields(message: str) -> str:
    """An error of `tensorrt_llm`, said of the text request's tensors."""
    names = {target: name for name, target in PASSED_ON.items() if name != target}
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], message)


def _row(array: npt.NDArray[Any], row: int, rows: int) -> npt.NDArray[Any]:
    if len(array) != rows:
        raise RequestError(f"a tensor has {len(array)} rows, and the request {rows}")
    return array[row : row + 1]


def _flag(inputs: Arrays, name: str, row: int) -> bool:
    array = inputs.get(name)
    return False if array is None or not array.size else bool(array.reshape(-1)[min(row, array.size - 1)])


def _count_sequences(inputs: Arrays, row: int) -> int:
    """A number of rows that is wrong, or itself is, `build_inputs` and `tensorrt_llm` refuse."""
    array = inputs.get("num_return_sequences")
    return 1 if array is None or not array.size else max(1, int(array.reshape(-1)[min(row, array.size - 1)]))


def _read_strings(inputs: Arrays, name: str, rows: int) -> list[tuple[str, ...]]:
    array = inputs.get(name)
    if array is None or not array.size:
        return [()] * rows
    try:
        return [tuple(word.decode() for word in _row(array, row, rows).reshape(-1) if word) for row in range(rows)]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8: {error}") from error
