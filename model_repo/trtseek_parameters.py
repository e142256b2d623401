"""What a request may carry beside its tensors: the protocol's parameters.

Triton's `generate` makes a parameter of each JSON key that is no input of the model, so a misspelt input comes as one:
what is not known is refused by name, as nobody would see that it had no effect.

Copied into the version folders of the text models. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

RETURN_IDS = "return_output_ids"  # of a text model's answer; tensorrt_llm's always has them
KNOWN = ("cache_salt", "min_p", "priority_class", "queue_timeout_ms", RETURN_IDS, "timeout_ms")
# Triton's, which its clients add and it does not always take out; so do all that begin like the last.
TRITONS = ("binary_data_output", "id", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout")
TRITONS_PREFIX = "triton_"
# What one model takes and another does not, and whom to ask for it.
TAKERS = {
    "messages": "tensorrt_llm_bls",
    **dict.fromkeys(("input_ids", "input_lengths"), "tensorrt_llm"),
    **dict.fromkeys(("text_input", "embedding_bias_words", "embedding_bias_weights"), "tensorrt_llm_bls and ensemble"),
}
# Names that other servers have for an input, or another model here -> what it may be called.
ALIASES = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length"), ("max_tokens", "request_output_len")),
    "max_tokens": ("request_output_len",),
    "request_output_len": ("max_tokens",),
    **dict.fromkeys(("stop", "stop_strings", "stop_sequences"), ("stop_words", "stop_words_list")),
    "stop_words": ("stop_words_list",),
    "stop_words_list": ("stop_words",),
    "bad_words": ("bad_words_list",),
    "bad_words_list": ("bad_words",),
    "stream": ("streaming",),
    "streaming": ("stream",),
    "top_k": ("runtime_top_k",),
    "runtime_top_k": ("top_k",),
    "top_p": ("runtime_top_p",),
    "runtime_top_p": ("top_p",),
    **dict.fromkeys(("prompt", "text", "inputs"), ("text_input",)),
    **dict.fromkeys(("n", "best_of"), ("num_return_sequences",)),
    "logprobs": ("return_log_probs",),
    "random_seed": ("seed",),
}


class ParameterError(ValueError):
    """The parameter `name` cannot be served; the message, which is the client's, names it, too."""

    def __init__(self, name: str, problem: str, hint: str) -> None:
        super().__init__(f"{name}: {problem} ({hint})")
        self.name, self.problem, self.hint = name, problem, hint


def check_parameters(parameters: Mapping[str, Any], model: str, inputs: Collection[str]) -> None:
    """Raises ParameterError for one that is not known. `inputs`: what the model that was asked takes as tensors; none
    where another model may be in between, and it cannot be known."""
    for name in parameters:
        if name in KNOWN or name in TRITONS or name.startswith(TRITONS_PREFIX):
            continue
        if name in inputs:
            raise ParameterError(name, f"is an input of {model}, and came as a parameter", "send it as a tensor")
        known = f"parameters: {', '.join(KNOWN)}"
        if not inputs:
            raise ParameterError(name, "is neither a parameter nor an input of the model that was asked", known)
        listed = f"{known}; inputs: {', '.join(sorted(inputs))}"
        if name in TAKERS:
            raise ParameterError(name, f"is no input of {model}, but of {TAKERS[name]}", listed)
        near = [alias for alias in ALIASES.get(name, ()) if alias in inputs]
        near = near or difflib.get_close_matches(name, [*KNOWN, *inputs], n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ParameterError(name, f"is neither a parameter nor an input of {model}", f"{meant}{listed}")


def check_inner_parameters(said: str | None, model: str) -> None:
    """Of a request as Triton tells it, which may be an ensemble's. Raises ParameterError for one that is not known."""
    check_parameters(json.loads(said or "{}"), model, ())


def read_choice(parameters: Mapping[str, Any], name: str) -> bool:
    """A parameter that is true or false; false where it is not given. Raises ParameterError."""
    value = parameters.get(name, False)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, bool):
        raise ParameterError(name, f"is {value!r}", "true or false")
    return value
