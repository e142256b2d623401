"""Text from tokens as they come: what has been said cannot be taken back, so only what is certain is said.

Copied into the version folder of `tensorrt_llm_bls`. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# What decoders put for bytes that are no character: several may be the beginning of one.
REPLACEMENT = "\ufffd"
# Tokens kept before the new ones: enough that a decoder which treats the first token in a special way (SentencePiece's
# drops its leading space) has others to do that to, and so few that decoding them again costs little.
CONTEXT, LONGEST = 8, 32


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """One sequence's text. What `add` and `finish` return, end to end, is what decoding prompt and answer as a whole
    gives after the prompt's text.

    A token may hold a part of a character. Bytes that never become one are decoded to U+FFFD, at most one for what may
    still be the beginning of a character; so all but a last U+FFFD is certain. (Not so where a tokenizer has byte
    tokens beside its characters and its decoder gives up a whole run of them for one that is wrong.)
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = list(prompt)
        self._said = ""
        self._shorten()

    def add(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._ids += ids
        text = self._certain(self._decoder.decode(self._ids))
        new, self._said = text[len(self._said) :], text
        if len(self._ids) > LONGEST:
            self._shorten()
        return new

    def finish(self) -> str:
        """What is left when no token follows: an unfinished character as U+FFFD."""
        return self._decoder.decode(self._ids)[len(self._said) :]

    def _shorten(self) -> None:
        """Keeps the last tokens only. Decoding begins anew there, so a character that is cut in two at the beginning is
        the same U+FFFD before and after each addition, and is never said."""
        kept = CONTEXT
        while kept < len(self._ids) and not self._decoder.decode(self._ids[-kept:]):
            kept *= 2  # special tokens without text
        self._ids = self._ids[-kept:]
        self._said = self._certain(self._decoder.decode(self._ids))

    @staticmethod
    def _certain(text: str) -> str:
        return text.removesuffix(REPLACEMENT)


class StopFinder:
    """Finds the first of several strings in a text that comes in pieces, wherever the pieces' borders lie.

    The stop string is not part of the text. What may be the beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What can be said now. Nothing comes after a stop string."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
