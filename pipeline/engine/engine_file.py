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

from pipeline.engine.engine_tensors import LIST, STRING, EngineTensor, count_profiles, merge_profiles, read_tensors
from pipeline.engine.myelin import Graph, read_graphs
from pipeline.errors import BuildError

_MAGIC = b"vtrt"
_HEADER = 64
# Compute capabilities in the header's bit mask. Bit 6 is set, with all others, in an engine built without a target.
_CAPABILITY_BITS = {0x01: 75, 0x02: 80, 0x04: 86, 0x08: 89, 0x10: 120, 0x20: 121}
_PROGRAM, _WEIGHTS = "NGNE", "THGW"
# The engine's name, then the workspace of every profile.
_WORKSPACES = re.compile(STRING + rb"(.{8})[\x20-\x7e]{1,1024}?" + LIST + rb"(.{8})", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the file: the program ("NGNE") or the weights ("THGW")."""

    tag: str
    offset: int
    nbytes: int


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
    tensors = read_tensors(data, start, first_graph if first_graph >= 0 else stop)
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
    merged, shapes = merge_profiles(tensors, len(grouped))
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


def _read_workspaces(data: mmap.mmap, start: int, stop: int) -> tuple[int, ...]:
    match = _WORKSPACES.search(data, start, stop)
    if not match:
        return ()
    count = int.from_bytes(match[2], "little")
    return struct.unpack_from(f"<{count}Q", data, match.end()) if match.end() + 8 * count <= stop else ()


def _group_graphs(tensors: tuple[EngineTensor, ...], graphs: tuple[Graph, ...]) -> list[tuple[Graph, ...]]:
    """Those of each profile: as many of each, one profile's after the other's."""
    profiles = count_profiles(tensors)
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


def _add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def _damaged(path: Path, problem: str) -> BuildError:
    return BuildError(
        f"{path}: {problem}", hint="the file is damaged, or of a TensorRT-RTX version not known here; rebuild"
    )
