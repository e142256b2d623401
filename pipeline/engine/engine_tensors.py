"""The inputs and outputs that an engine file lists, found by the tags that TensorRT-RTX's serializer writes: see
engine_file.py."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, replace

# The serializer writes a 4-byte tag before each value: int32, a list's element, a string.
INT, LIST, STRING = b"\x07\x80\x01\x00", b"\x01\x80\x08\x80\x01\x00", b"\x01\x80\x0c\x80\x01\x00"
# name, then its type; then its shape (negative: dynamic); then whether it is an output, and its index.
_BINDING = re.compile(
    STRING + rb"(.{8})([\x20-\x7e]{1,1024}?)\x1c\x80\x01\x00\x03\x80\x01\x00.\x0d\x80\x01\x00" + INT + rb"(.{4})",
    re.S,
)
_SHAPE = re.compile(rb"Y\x80\x01\x00" + INT + rb"(.{4})\x01\x80\x09\x80\x01\x00(.{8})", re.S)
_DIRECTION = re.compile(rb"\x28\x80\x01\x00" + INT + rb"(.{4})\x06\x80\x01\x00(.{4})", re.S)
_PROFILE_SUFFIX = re.compile(r"(.+) \[profile (\d+)\]")
# Values of TensorRT's DataType.
_DTYPES = ("float32", "float16", "int8", "int32", "bool", "uint8", "fp8", "bfloat16", "int64", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """An input or output of the engine; -1 in `shape` is a size chosen at run time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_input: bool


def read_tensors(data: mmap.mmap, start: int, stop: int) -> tuple[EngineTensor, ...]:
    """Between two places of the file, inputs first, in the engine's order: one for each profile."""
    tensors: list[tuple[bool, int, EngineTensor]] = []
    for match in _BINDING.finditer(data, start, stop):
        length, name, dtype = match.groups()
        shape = _SHAPE.search(data, match.end(), stop)
        direction = _DIRECTION.search(data, shape.end(), stop) if shape else None
        if not shape or not direction or int.from_bytes(length, "little") != len(name):
            continue
        if _SHAPE.search(data, shape.end(), direction.start()):
            continue  # that is another tensor's direction: this one lies between two graphs of the engine
        rank = int.from_bytes(shape[1], "little")
        code = int.from_bytes(dtype, "little")
        if rank > 8 or code >= len(_DTYPES) or shape.end() + 8 * rank > stop:
            continue
        dims = struct.unpack_from(f"<{rank}q", data, shape.end())
        is_output = bool(int.from_bytes(direction[1], "little"))
        tensor = EngineTensor(
            name=name.decode(),
            dtype=_DTYPES[code],
            shape=tuple(max(dim, -1) for dim in dims),
            is_input=not is_output,
        )
        tensors.append((is_output, int.from_bytes(direction[2], "little"), tensor))
    return tuple(tensor for _, _, tensor in sorted(tensors, key=lambda item: item[:2]))


def count_profiles(tensors: tuple[EngineTensor, ...]) -> int:
    suffixes = [_PROFILE_SUFFIX.fullmatch(tensor.name) for tensor in tensors]
    return 1 + max((int(match[2]) for match in suffixes if match), default=0)


def merge_profiles(
    tensors: tuple[EngineTensor, ...], count: int
) -> tuple[tuple[EngineTensor, ...], list[dict[str, tuple[int, ...]]]]:
    """The file lists every tensor once per profile, as "name [profile 1]" after the first: the tensors once, with -1
    wherever profiles differ, and the shapes of each profile."""
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    for tensor in tensors:
        suffixed = _PROFILE_SUFFIX.fullmatch(tensor.name)
        index = int(suffixed[2]) if suffixed else 0
        if index < count:
            shapes[index][suffixed[1] if suffixed else tensor.name] = tensor.shape
    merged = []
    for tensor in tensors:
        if tensor.name in shapes[0]:
            seen = [profile.get(tensor.name, tensor.shape) for profile in shapes]
            shape = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*seen, strict=True))
            merged.append(replace(tensor, shape=shape))
    return tuple(merged), shapes
