"""What the server owes a client's call: the models that have not yet answered it to the end, and when it was answered
last. Of gRPC's messages only the first fields are read, which come before the tensors, however large those are.

Triton says of an answer in a stream whether it is the request's last, with one exception: where a model ends an answer
with nothing more, a client is told of it only if it has asked for that (tritonclient's `enable_empty_final_response`).
Without, such a model owes the stream an answer for as far as anybody can know.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator

# How protobuf begins a ModelInferRequest's model_name (field 1, bytes that are counted), and what one byte can count.
MODEL_NAME, LONGEST_NAME = 0x0A, 0x7F
# Fields of ModelInferRequest and ModelInferResponse alike, which every library writes in their order; then tensors.
NAME, ID, PARAMETERS = 1, 3, 4
ERROR, INFER_RESPONSE = 1, 2  # of ModelStreamInferResponse
MOST = 10_000  # requests that one stream is remembered to have open
FEW = 8  # fields among which a client's id is looked for: a message may hold millions, each of two bytes
FINAL = b"\n\x15triton_final_response\x12\x02\x08\x01"  # a parameter that is true


class Owed:
    """Of one call. `models`: those that it asks, where that is known from the beginning."""

    def __init__(self, *models: str) -> None:
        self._open = Counter((model, b"") for model in models)
        self._never: set[str] = set()  # that are not known to have answered, whatever comes
        self._heard = -math.inf

    @property
    def models(self) -> set[str]:
        # Copied at once: another thread may ask while requests come and go.
        return self._never | {model for model, _ in list(self._open)}

    def ask(self, message: bytes) -> None:
        """A ModelInferRequest goes out."""
        if model := read_model(message):
            self._open[model, _read_id(message)] += 1
        if len(self._open) > MOST:
            self._never |= self.models
            self._open.clear()

    def hear(self) -> None:
        """An answer has come."""
        self._heard = time.monotonic()

    def hear_stream(self, message: bytes) -> None:
        """A ModelStreamInferResponse has come."""
        self.hear()
        failed = False
        for number, start, end in _read_fields(message, 0, len(message), INFER_RESPONSE):
            if number == ERROR:
                failed = True
            else:
                fields = [(field, message[a:b]) for field, a, b in _read_fields(message, start, end, PARAMETERS)]
                named = dict(fields)
                model, identity = named.get(NAME, b"").decode(errors="replace"), named.get(ID, b"")
                if (PARAMETERS, FINAL) in fields:
                    self._pay(model, identity)
                elif failed and not model:  # refused before any model saw it: Triton says of what id, and no more
                    self._pay(next((model for model, each in self._open if each == identity), ""), identity)

    def _pay(self, model: str, identity: bytes) -> None:
        """One request of these, if there is one."""
        if (count := self._open.pop((model, identity), 0)) > 1:
            self._open[model, identity] = count - 1

    def is_silent(self, since: float) -> bool:
        """Whether no answer has come since then, a time of time.monotonic()."""
        return self._heard < since


def read_model(message: bytes) -> str:
    """The model that a ModelInferRequest is for, "" where it is not its first field, as every library writes it: so
    that the rest, which may be large, need not be read."""
    tag, length = message[:2].ljust(2, b"\0")
    if tag != MODEL_NAME or length > LONGEST_NAME:
        return ""
    return message[2 : 2 + length].decode(errors="replace")


def _read_id(message: bytes) -> bytes:
    fields = itertools.islice(_read_fields(message, 0, len(message), ID), FEW)
    return next((message[a:b] for number, a, b in fields if number == ID), b"")


def _read_fields(message: bytes, start: int, end: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Number and place of each field, up to number `last`, as long as they are counted bytes: all of these are."""
    while start < end:
        tag, start = _read_varint(message, start)
        if tag & 7 != 2 or tag >> 3 > last:
            return
        length, start = _read_varint(message, start)
        yield tag >> 3, start, min(start + length, end)
        start += length


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """The number, and the place after it."""
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place
