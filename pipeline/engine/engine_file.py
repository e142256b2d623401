"""An engine, read straight from its file: no GPU, no TensorRT. `inspect_engine` is the public face.

The container is TensorRT-RTX's: a 64-byte header, a section table, the program, the weights (all little-endian).
TensorRT does not document it. Offsets and tags below were found in engines of version 1.7, and every number that is
read is held in tests against what the builder logged or was told; a file that does not fit is refused, never guessed.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.engine.myelin import Graph, read_graphs
from pipeline.errors import BuildError

_MAGIC = b"vtrt"
_HEADER = 64
# Compute capabilities in the header's bit mask. Bit 6 is set, with all others, in an engine built without a target.
_CAPABILITY_BITS = {0x01: 75, 0x02: 80, 0x04: 86, 0x08: 89, 0x10: 120, 0x20: 121}
_PROGRAM, _WEIGHTS = "NGNE", "THGW"
# The serializer writes a 4-byte tag before each value: int32, a list's element, a string.
_INT, _LIST, _STRING = b"\x07\x80\x01\x00", b"\x01\x80\x08\x80\x01\x00", b"\x01\x80\x0c\x80\x01\x00"
# name, then its type; then its shape (negative: dynamic); then whether it is an output, and its index.
_BINDING = re.compile(
    _STRING + rb"(.{8})([\x20-\x7e]{1,1024}?)\x1c\x80\x01\x00\x03\x80\x01\x00.\x0d\x80\x01\x00" + _INT + rb"(.{4})",
    re.S,
)
_SHAPE = re.compile(rb"Y\x80\x01\x00" + _INT + rb"(.{4})\x01\x80\x09\x80\x01\x00(.{8})", re.S)
_DIRECTION = re.compile(rb"\x28\x80\x01\x00" + _INT + rb"(.{4})\x06\x80\x01\x00(.{4})", re.S)
# The engine's name, then the workspace of every profile.
_WORKSPACES = re.compile(_STRING + rb"(.{8})[\x20-\x7e]{1,1024}?" + _LIST + rb"(.{8})", re.S)
_PROFILE_SUFFIX = re.compile(r"(.+) \[profile (\d+)\]")
# Values of TensorRT's DataType.
_DTYPES = ("float32", "float16", "int8", "int32", "bool", "uint8", "fp8", "bfloat16", "int64", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the file: the program ("NGNE") or the weights ("THGW")."""

    tag: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """An input or output of the engine; -1 in `shape` is a size chosen at run time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """What one optimization profile runs, and the inputs and outputs as it sees them: its own sizes are fixed.

    graphs: in order; plugins run between them. workspace_bytes: device memory beside weights, inputs and outputs."""

    shapes: Mapping[str, tuple[int, ...]]
    graphs: tuple[Graph, ...]
    workspace_bytes: int

    @property
    def graph(self) -> Graph:
        """The graphs as one, which they are without plugins. They take turns in the same memory: the regions are those
        of the largest."""
        largest = max(self.graphs, key=lambda graph: graph.workspace_bytes)
        kernels, fusions = (_add_up(getattr(graph, name) for graph in self.graphs) for name in ("kernels", "fusions"))
        return replace(largest, kernels=kernels, fusions=fusions)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """What a TensorRT-RTX engine file says about itself."""

    path: Path
    nbytes: int
    version: str
    targets: tuple[int, ...]  # SM numbers: 80, 86, …
    sections: tuple[Section, ...]
    tensors: tuple[EngineTensor, ...]
    profiles: tuple[EngineProfile, ...]

    @property
    def weights_bytes(self) -> int:
        """Weights on the GPU: stored once, whatever the number of profiles."""
        return sum(section.nbytes for section in self.sections if section.tag == _WEIGHTS)

    @property
    def inputs(self) -> tuple[EngineTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_input)

    @property
    def outputs(self) -> tuple[EngineTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_input)

    @property
    def kernels(self) -> Mapping[str, int]:
        """Kernel launches by kind, over all profiles."""
        return _add_up(profile.graph.kernels for profile in self.profiles)

    @property
    def fusions(self) -> Mapping[str, int]:
        """GEMMs with something fused, by the compiler's name, over all profiles."""
        return _add_up(profile.graph.fusions for profile in self.profiles)


def inspect_engine(path: Path) -> EngineFile:
    """Reads a TensorRT-RTX engine file. Raises BuildError where the file is damaged or of another kind."""
    try:
        with open(path, "rb") as file:
            nbytes = file.seek(0, 2)
            if nbytes < _HEADER:
                raise _damaged(path, f"has {nbytes} bytes; an engine has more")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _inspect(path, data)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}", hint="name an engine file that exists") from None


def _inspect(path: Path, data: mmap.mmap) -> EngineFile:
    if data[:4] != _MAGIC:
        raise BuildError(
            f"{path}: not a TensorRT-RTX engine (it starts with {data[:4]!r}, not {_MAGIC!r})",
            hint="engines of TensorRT itself can only be read by TensorRT, on the GPU they were built for",
        )
    sections = _read_sections(path, data)
    program = next((section for section in sections if section.tag == _PROGRAM), None)
    if program is None:
        raise _damaged(path, f"has no program section ({_PROGRAM})")
    start, stop = program.offset, program.offset + program.nbytes
    first_graph = data.find(b"header {\n", start, stop)
    tensors = _read_tensors(data, start, first_graph if first_graph >= 0 else stop)
    graphs = tuple(read_graphs(data, start, stop))
    if not tensors or not graphs:
        what = "inputs and outputs" if not tensors else "compiled graph"
        raise _damaged(path, f"has no {what} where version 1.7 keeps them")
    grouped = _group_graphs(tensors, graphs)
    stated = _read_workspaces(data, start, first_graph)
    workspaces = _share_workspaces(stated, grouped)
    if workspaces is None:
        found = ", ".join(str(graph.workspace_bytes) for graph in graphs)
        raise _damaged(path, f"states workspaces of {stated} bytes, but its graphs need {found}")
    merged, shapes = _merge_profiles(tensors, len(grouped))
    (mask,) = struct.unpack_from("<Q", data, 0x20)
    return EngineFile(
        path=path,
        nbytes=len(data),
        version=_read_version(data),
        targets=tuple(sm for bit, sm in _CAPABILITY_BITS.items() if mask & bit),
        sections=sections,
        tensors=merged,
        profiles=tuple(
            EngineProfile(shapes=s, graphs=g, workspace_bytes=w)
            for s, g, w in zip(shapes, grouped, workspaces, strict=True)
        ),
    )


def _read_version(data: mmap.mmap) -> str:
    major, minor, patch, build = data[24:28]
    return f"{major}.{minor}.{patch}.{build}"


def _read_sections(path: Path, data: mmap.mmap) -> tuple[Section, ...]:
    """Entries of 24 bytes (tag, 4 bytes, offset, size), offsets from the header's end, up to the first that is none."""
    version, stated = struct.unpack_from("<QQ", data, 8)
    if version != 2:
        raise _damaged(path, f"has container version {version}; version 2 is read")
    sections: list[Section] = []
    position = _HEADER
    while position + 24 <= len(data) and data[position : position + 4] in (_PROGRAM.encode(), _WEIGHTS.encode()):
        tag = data[position : position + 4].decode()
        offset, nbytes = struct.unpack_from("<QQ", data, position + 8)
        if offset + nbytes > len(data):
            raise _damaged(
                path, f"ends at byte {len(data)}, inside its section {tag}, which ends at {offset + nbytes}: truncated"
            )
        sections.append(Section(tag=tag, offset=offset, nbytes=nbytes))
        position += 24
    if len(data) < stated:
        raise _damaged(path, f"has {len(data)} bytes, but its header says {stated}: truncated")
    return tuple(sections)


def _read_tensors(data: mmap.mmap, start: int, stop: int) -> tuple[EngineTensor, ...]:
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


def _read_workspaces(data: mmap.mmap, start: int, stop: int) -> tuple[int, ...]:
    match = _WORKSPACES.search(data, start, stop)
    if not match:
        return ()
    count = int.from_bytes(match[2], "little")
    return struct.unpack_from(f"<{count}Q", data, match.end()) if match.end() + 8 * count <= stop else ()


def _group_graphs(tensors: tuple[EngineTensor, ...], graphs: tuple[Graph, ...]) -> list[tuple[Graph, ...]]:
    """Those of each profile: as many of each, one profile's after the other's."""
    suffixes = [_PROFILE_SUFFIX.fullmatch(tensor.name) for tensor in tensors]
    profiles = 1 + max((int(match[2]) for match in suffixes if match), default=0)
    each = max(len(graphs) // profiles, 1)
    return [graphs[first : first + each] for first in range(0, len(graphs), each)]


def _share_workspaces(stated: tuple[int, ...], grouped: list[tuple[Graph, ...]]) -> list[int] | None:
    """The file states, for each profile, the memory in which its graphs take turns, and after it that of each tensor
    between them: where plugins part graphs, and sizes that are computed on the way, as a rank's share of the tokens.
    The sum for each profile, or None where that is not what it states."""
    starts: list[int] = []
    for graphs in grouped:
        largest = max(graph.workspace_bytes for graph in graphs)
        first = starts[-1] + 1 if starts else 0
        if largest not in stated[first:]:
            return None
        starts.append(stated.index(largest, first))
    if starts[0] != 0:
        return None
    return [sum(stated[start:end]) for start, end in zip(starts, [*starts[1:], len(stated)], strict=True)]


def _merge_profiles(
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


def _add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def _damaged(path: Path, problem: str) -> BuildError:
    return BuildError(
        f"{path}: {problem}", hint="the file is damaged, or of a TensorRT-RTX version not known here; rebuild"
    )
