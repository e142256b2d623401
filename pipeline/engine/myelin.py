"""The program inside an engine file: text that TensorRT's graph compiler (Myelin) writes for its own runtime.

One graph per optimization profile: device memory regions with their sizes, the tensors that share each region, and the
list of kernels. TensorRT does not document it; what is read here was found in engines of TensorRT-RTX 1.7, and agrees
with what the builder logs (tests hold both against each other).
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# A profile's workspace is one allocation, padded to this many bytes.
GRANULE = 512

_REGION = re.compile(
    rb"region = \{ name=(\S+) size=(\d+) alignment=\d+ instance=\d+ type=\w+ place=(\w+)"
    rb" unified=\w+( constant=true)? \}"
)
_ACCELERATORS = re.compile(rb"accelerators=\{([^}]*)\}")
_INPUTS = re.compile(rb"^  inputs=\{([^}\n]*)\}", re.M)
# What an engine without weights calls a constant that a refit brings.
_LATER_CONSTANT = re.compile(rb"_constant[A-Z]\w*___mye")
_TENSOR = re.compile(rb'^  tensor=\{[^\n]*? dims=\{ ([^}]*)\}[^\n]*? name="([^"\n]*)"[^\n]*? region="([^"\n]*)"', re.M)
_TYPE = re.compile(rb" type=(\w+)")
_KERNEL = re.compile(rb'^  (\w+)=\{ name=("[^"\n]*"|\S+)', re.M)
# Bookkeeping between streams and of shapes on the host; everything else in the main block runs on the GPU.
_NOT_KERNELS = {b"signal", b"wait", b"shape_call"}
_GENERATED = b"__myl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTensor:
    """A tensor that lives in a region for a while. `dims` are numbers, or the compiler's names of dynamic sizes."""

    name: str
    dtype: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A piece of the workspace, shared by tensors that are never alive together; as large as the largest of them."""

    name: str
    nbytes: int
    tensors: tuple[RegionTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What TensorRT compiled for one optimization profile."""

    targets: tuple[str, ...]  # "sm80", …
    regions: tuple[Region, ...]  # largest first
    kernels: Mapping[str, int]  # launches by kind: fully_connected, runtime_fusion, _gemm_mha_v2, generated, …
    fusions: Mapping[str, int]  # GEMMs with something fused, by the compiler's name: __myl_ReplCastMulCastFc, …

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a context of this profile needs beside weights, inputs and outputs."""
        return -(-sum(region.nbytes for region in self.regions) // GRANULE) * GRANULE


def read_graphs(data: bytes | mmap.mmap, start: int, stop: int) -> Iterator[Graph]:
    """The graphs in `data[start:stop]`, in the order of the engine's profiles.

    Passed over are the small graphs of single fused GEMMs, which name no target of their own (`accelerators={*}`), and
    those of an engine without weights that lay out one constant each when a refit brings it.
    """
    position = data.find(b"header {\n", start, stop)
    while position >= 0:
        end = data.find(b"\0", position, stop)
        end = stop if end < 0 else end
        text = data[position:end]
        accelerators = _ACCELERATORS.search(text)
        named = accelerators is not None and accelerators[1].strip() not in (b"", b"*")
        if accelerators and named and not _lays_out_constants(text):
            yield _parse_graph(text, accelerators[1])
        position = data.find(b"header {\n", end, stop)


def _lays_out_constants(text: bytes) -> bool:
    inputs = _INPUTS.search(text)
    names = inputs[1].split() if inputs else []
    return bool(names) and all(_LATER_CONSTANT.search(name) for name in names)


def _parse_graph(text: bytes, accelerators: bytes) -> Graph:
    main = text.find(b"\nmain {")
    main_end = text.find(b"\n}", main)
    kernels: Counter[str] = Counter()
    fusions: Counter[str] = Counter()
    for kind, name in _KERNEL.findall(text, main, main_end):
        if kind in _NOT_KERNELS:
            continue
        if kind == b"runtime_fusion":
            fusions[_decode(name)] += 1
        if kind != b"function":
            kernels[_decode(kind)] += 1
        else:
            kernels["generated" if name.startswith(_GENERATED) else _decode(name)] += 1
    return Graph(
        targets=tuple(_decode(accelerators).split()),
        regions=_parse_regions(text, main),
        kernels=dict(sorted(kernels.items())),
        fusions=dict(sorted(fusions.items())),
    )


def _parse_regions(text: bytes, main: int) -> tuple[Region, ...]:
    sizes = {
        name: int(size)
        for name, size, place, constant in _REGION.findall(text, 0, main)
        if place == b"accelerator" and not constant
    }
    tensors: dict[bytes, list[RegionTensor]] = {name: [] for name in sizes}
    for match in _TENSOR.finditer(text, 0, main):
        dims, name, region = match.groups()
        if region in tensors:
            kind = _TYPE.search(text, match.end())
            tensors[region].append(
                RegionTensor(
                    name=_decode(name),
                    dtype=_decode(kind[1]) if kind else "",
                    dims=tuple(_decode(dims).replace('"', "").split()),
                )
            )
    regions = [
        Region(name=_decode(name), nbytes=size, tensors=tuple(tensors[name])) for name, size in sizes.items() if size
    ]
    return tuple(sorted(regions, key=lambda region: (-region.nbytes, region.name)))


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip('"')
