"""The answer to one prompt: from the responses of `tensorrt_llm` to those of `tensorrt_llm_bls`.

Copied into the version folder of `tensorrt_llm_bls`. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from trtseek_chat import Prompt
from trtseek_stream import Detokenizer, StopFinder
from trtseek_text import Tokenizer

Arrays = dict[str, npt.NDArray[Any]]

# Outputs that belong to tokens, and are put end to end: the axis of the tokens.
PER_TOKEN = {"output_ids": 2, "output_log_probs": 2, "generation_logits": 2}
LOG_PROBS, SUM, COUNT = "output_log_probs", "cum_log_probs", "num_output_tokens"


class Sequence:
    """One of the sequences that a prompt is answered with."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.detokenizer = Detokenizer(tokenizer, prompt.ids)
        self.finder, self.may_stop = StopFinder(prompt.stops), bool(prompt.stops)
        self.count = 0  # of its tokens
        self.text = prompt.text if prompt.repeats else ""
        self.others: dict[str, list[npt.NDArray[Any]]] = {}
        self.unsaid = self.text
        self.answered = False

    def add(self, arrays: Arrays, wanted: tuple[str, ...]) -> None:
        ids = arrays["output_ids"][..., : int(arrays["sequence_length"].reshape(-1)[0])]
        tokens = ids.reshape(-1).tolist()
        taken = 0
        # What comes together may go on after a stop string, and that is nobody's.
        for piece in [[token] for token in tokens] if self.may_stop else [tokens]:
            self._say(self.finder.add(self.detokenizer.add(piece)))
            taken += len(piece)
            if self.finder.found:
                break
        self.count += taken
        self.keep(_cut({**arrays, "output_ids": ids}, taken, len(tokens)), wanted)

    def keep(self, arrays: Arrays, wanted: tuple[str, ...]) -> None:
        for name in wanted:
            if name in arrays:
                self.others.setdefault(name, []).append(arrays[name])

    def finish(self) -> None:
        self._say(self.finder.add(self.detokenizer.finish()))
        if not self.finder.found:
            self._say(self.finder.finish())

    def take(self, *, whole: bool) -> tuple[str, Arrays]:
        """What is to be said: the text since the last time, or the whole of it."""
        text = self.text if whole else self.unsaid
        arrays = {
            name: np.concatenate(parts, PER_TOKEN[name]) if name in PER_TOKEN else parts[-1]
            for name, parts in self.others.items()
        }
        if self.finder.found and COUNT in arrays:  # tensorrt_llm's own has what was made until it heard of the stop
            arrays[COUNT] = np.full_like(arrays[COUNT], self.count)
        self.unsaid, self.others, self.answered = "", {}, True
        return text, arrays

    def _say(self, text: str) -> None:
        self.text += text
        self.unsaid += text


class Answer:
    """All sequences of one prompt. `accumulates`: each response of a stream repeats the text so far."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, *, row: int, accumulates: bool) -> None:
        self._tokenizer, self._prompt, self._row, self._accumulates = tokenizer, prompt, row, accumulates
        self._sequences: dict[int, Sequence] = {}

    @property
    def outputs(self) -> list[str]:
        """What to ask of `tensorrt_llm`."""
        return list(dict.fromkeys(["output_ids", "sequence_length", "sequence_index", *self._prompt.wanted]))

    @property
    def stopped(self) -> bool:
        """Whether every sequence has met a stop string, those that have said nothing yet too: what is still generated
        is for nobody."""
        found = [sequence.finder.found for sequence in self._sequences.values()]
        return all(found) and len(found) >= int(self._prompt.sequences)

    def add(self, arrays: Arrays) -> list[Arrays]:
        """The responses that a response of `tensorrt_llm` leads to: none while nothing new is certain."""
        index = int(arrays["sequence_index"].reshape(-1)[0])
        sequence = self._sequences.setdefault(index, Sequence(self._tokenizer, self._prompt))
        wanted = self._prompt.wanted
        if not sequence.finder.found:
            sequence.add(arrays, wanted)
        else:  # tokens after a stop string are nobody's; what is told at the end is still told
            sequence.keep(arrays, tuple(name for name in wanted if name not in PER_TOKEN and name != SUM))
        return [self._respond(index)] if self._prompt.streams and sequence.unsaid else []

    def finish(self) -> list[Arrays]:
        """The responses when `tensorrt_llm` has said all."""
        responses = []
        for index, sequence in sorted(self._sequences.items()):
            sequence.finish()
            if sequence.unsaid or sequence.others or not sequence.answered:
                responses.append(self._respond(index))
        return responses

    def _respond(self, index: int) -> Arrays:
        text, arrays = self._sequences[index].take(whole=self._accumulates or not self._prompt.streams)
        return {
            "text_output": np.array([text.encode()], np.object_),
            "batch_index": np.array([[self._row]], np.int32),
            "sequence_index": np.array([[index]], np.int32),
            **arrays,
        }


def _cut(arrays: Arrays, taken: int, tokens: int) -> Arrays:
    """What belongs to the first `taken` of so many tokens."""
    if taken == tokens:
        return arrays
    cut = dict(arrays)
    if SUM in arrays and arrays.get(LOG_PROBS, np.empty(0)).size == tokens:
        cut[SUM] = arrays[SUM] - arrays[LOG_PROBS].reshape(-1)[taken:].sum(dtype=arrays[SUM].dtype)
    for name, axis in PER_TOKEN.items():
        if name in arrays and arrays[name].ndim > axis and arrays[name].shape[axis] == tokens:
            cut[name] = np.take(arrays[name], range(taken), axis)
    return cut
