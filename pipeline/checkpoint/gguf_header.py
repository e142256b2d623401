"""Reading the header of a GGUF file, llama.cpp's: what it says of a model and its tensors, without the gguf library.

The format, little-endian (github.com/ggml-org/ggml, docs/gguf.md): "GGUF", version u32, tensors u64, keys u64; each key
with the type of its value and the value; each tensor with its dimensions, fastest first, its type and its place in the
data, which begin at the next multiple of general.alignment.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Of ggml: a type's name, elements and bytes of its blocks.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1),
    25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
# Values of one size, by the format's number for their type, as struct spells them; then text and lists.
PLAIN = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, LIST = 8, 9
MAX_KEY, MAX_TEXT, MAX_DIMENSIONS = 65535, 1 << 26, 4  # bytes of a name and of a text; the files have gigabytes
DAMAGED = "the file is damaged or was cut short; download or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """`shape` as PyTorch's, the fastest last; `dtype` a name of TYPES; `nbytes` in the file, without padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """`values`: the keys' by name, of a list its length only."""

    version: int
    values: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufHeader:
    """Raises CheckpointError where it is no GGUF file, is of another version, or ends before its last tensor does."""
    with open(path, "rb") as file:
        return _Reader(path, file).read()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.nbytes = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            self._fail("does not begin as a GGUF file does")
        version = self._number("I")
        if version not in VERSIONS:
            self._fail(f"is GGUF of version {version}; read are {', '.join(map(str, VERSIONS))}", "convert it again")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        values = {}
        for _ in range(key_count):
            name = self._text(MAX_KEY)
            values[name] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment < 1 << 30:
            self._fail(f"has general.alignment {alignment}")
        start = -(-self.file.tell() // alignment) * alignment
        for tensor, offset in found:
            if start + offset + tensor.nbytes > self.nbytes:
                self._fail(
                    f"ends before its tensor {tensor.name[:200]!a} does, at {start + offset + tensor.nbytes} bytes"
                )
        return GgufHeader(version=version, values=values, tensors=tuple(tensor for tensor, _ in found))

    def _tensor(self) -> tuple[GgufTensor, int]:
        name, dimensions = self._text(MAX_KEY), self._number("I")
        if dimensions > MAX_DIMENSIONS:
            self._fail(f"has a tensor of {dimensions} dimensions, {name[:200]!a}")
        sizes = tuple(self._number("Q") for _ in range(dimensions))
        kind = self._number("I")
        if kind not in TYPES:
            self._fail(
                f"has the tensor {name[:200]!a} of type {kind}, which is not known", "a later trtseek may know it"
            )
        dtype, elements, nbytes = TYPES[kind]
        size = math.prod(sizes) // elements * nbytes
        return GgufTensor(name=name, dtype=dtype, shape=sizes[::-1], nbytes=size), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in PLAIN:
            return self._number(PLAIN[kind])
        if kind == TEXT:
            return self._text(MAX_TEXT)
        if kind != LIST:
            self._fail(f"has a value of type {kind}, which is not known")
        item, count = self._number("I"), self._number("Q")
        if item in PLAIN:
            self._skip(count * struct.calcsize(PLAIN[item]))
        elif item == TEXT:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._fail(f"has a list of type {item}, which is not known")
        return count

    def _text(self, most: int) -> str:
        size = self._number("Q")
        if size > most:
            self._fail(f"has a text of {size} bytes in its header")
        return self._take(size).decode("utf-8", "replace")

    def _number(self, spelling: str) -> Any:
        return struct.unpack(f"<{spelling}", self._take(struct.calcsize(spelling)))[0]

    def _skip(self, size: int) -> None:
        self._check(size)
        self.file.seek(size, os.SEEK_CUR)

    def _take(self, size: int) -> bytes:
        self._check(size)
        return self.file.read(size)

    def _check(self, size: int) -> None:
        if self.file.tell() + size > self.nbytes:
            self._fail(f"ends within its header, at {self.nbytes} bytes")

    def _fail(self, problem: str, hint: str = DAMAGED) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}", hint=hint)
