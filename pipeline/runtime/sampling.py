"""What a request asks of the choice of its tokens. Names and defaults are those of TensorRT-LLM's `tensorrt_llm` model.

Order of operations on a row of logits:
    1. embedding_bias is added; the repetition penalty divides positive logits of tokens seen before and multiplies
       negative ones (Keskar et al., 2019, arXiv 1909.05858); the presence penalty is subtracted once, the frequency
       penalty once per occurrence. Seen means in the prompt or in what was generated, as in TensorRT-LLM.
    2. Bad words, and the end id before min_tokens, are excluded.
    3. Logits are divided by the temperature.
    4. The top_k best stay; of these the smallest set that reaches top_p of their probability (Holtzman et al., 2020,
       arXiv 1904.09751); of these the tokens with at least min_p times the best one's probability.
    5. One is drawn from what is left, renormalized.
Steps 3 to 5 are the logits processors of `transformers`. (TensorRT-LLM's own kernel divides by the temperature before
it subtracts the presence and frequency penalties, and draws the last token of a nucleus with only that part of its
probability that is below top_p.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.runtime.errors import RequestError

Words = tuple[tuple[int, ...], ...]
MAX_SEED = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Raises RequestError, naming the field, for a value outside its range.

    temperature: 0 is greedy.
    top_k, top_p: 0 sets no limit; where both are 0 the best token is taken, as in TensorRT-LLM, at any temperature.
    min_p: 0 sets no limit.
    top_p_decay, top_p_min, top_p_reset_id: after each token top_p becomes max(top_p * top_p_decay, top_p_min), and what
        it was at first again after the token top_p_reset_id (Lee et al., 2022, arXiv 2206.04624). -1: no such token.
    seed: of the request's own random numbers; None takes a new one, which the result tells.
    min_tokens: the end id cannot come before so many tokens. Stop words can.
    bad_words: sequences of tokens, whose last one cannot follow the others.
    embedding_bias: [vocabulary] float32, added to the logits; -inf excludes a token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    bad_words: Words = ()
    embedding_bias: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, (low, high, kind) in RANGES.items():
            check_range(name, getattr(self, name), low, high, kind)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty", "is 0", hint="1 changes nothing, more than 1 discourages")
        if self.seed is not None:
            check_range("seed", self.seed, 0, MAX_SEED - 1, int)
        object.__setattr__(self, "bad_words", check_words("bad_words", self.bad_words))
        if self.embedding_bias is not None:
            bias = np.ascontiguousarray(self.embedding_bias, np.float32)
            if bias.ndim != 1 or np.isnan(bias).any() or (bias == np.inf).any():
                raise RequestError("embedding_bias", "must be one row of numbers, finite or -inf")
            object.__setattr__(self, "embedding_bias", bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# Field -> lowest, highest, type.
RANGES: dict[str, tuple[float, float, type]] = {
    "temperature": (0, 1e6, float),
    "top_k": (0, 2**31 - 1, int),
    "top_p": (0, 1, float),
    "min_p": (0, 1, float),
    "top_p_decay": (0, 1, float),
    "top_p_min": (1e-9, 1, float),
    "top_p_reset_id": (-1, 2**31 - 1, int),
    "repetition_penalty": (0, 1e3, float),
    "presence_penalty": (-1e3, 1e3, float),
    "frequency_penalty": (-1e3, 1e3, float),
    "min_tokens": (0, 2**31 - 1, int),
}


def check_range(name: str, value: Any, low: float, high: float, kind: type) -> None:
    """Raises RequestError unless `value` is a number of this kind within [low, high]."""
    is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise RequestError(name, f"is {value!r}", hint=f"give {noun} from {low:g} to {high:g}")


def check_words(name: str, words: Sequence[Sequence[int]]) -> Words:
    """Words as tuples. Raises RequestError for one without tokens or with a negative one."""
    checked = tuple(tuple(int(token) for token in word) for word in words)
    for word in checked:
        if not word or min(word) < 0:
            raise RequestError(name, f"holds {list(word)}", hint="a word is one token id or more, none negative")
    return checked
