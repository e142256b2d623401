"""The way of a plugin into a network of TensorRT-RTX, whose API has no `add_plugin_v3`: only its ONNX parser adds one.

The parser takes an empty network only. So it is given, first of all, a graph with one node for each plugin that the
network will have, over made-up constants; the rest is then written with the API, which connects the real inputs. The
graph is a few messages of onnx.proto (github.com/onnx/onnx): written here, since that is all we need of ONNX.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import BuildError

PLACEHOLDER = "placeholder of "  # begins the names of the made-up constants
OPSET, IR_VERSION, STRING = 21, 10, 3
# Type -> TensorProto.DataType, bytes of an element.
TYPES = {
    "float32": (1, 4),
    "int8": (3, 1),
    "int32": (6, 4),
    "float16": (10, 2),
    "bfloat16": (16, 2),
    "fp8": (17, 1),
    "int4": (22, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkeletonNode:
    """name: of its layer. op, domain: the plugin's name and namespace. inputs: type and rank of each. fields: texts."""

    name: str
    op: str
    domain: str
    version: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]


def parse_skeleton(trt: Any, network: Any, nodes: Sequence[SkeletonNode]) -> list[Any]:
    """Fills an empty network with the nodes → their layers, in order, none of their outputs marked. Raises BuildError
    with the parser's words."""
    parser = trt.OnnxParser(network, network.builder.logger)
    with _unversioned_library(trt):
        parsed = parser.parse(encode(nodes))
    if not parsed:
        words = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise BuildError(f"TensorRT's parser refuses the plugins: {words}", hint="see the build log")
    for _ in range(network.num_outputs):
        network.unmark_output(network.get_output(0))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    found = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    for layer in found:
        layer.__class__ = trt.IPluginV3Layer
    return found


def encode(nodes: Sequence[SkeletonNode]) -> bytes:
    """A ModelProto. The first output of each node is the graph's."""
    parts, initializers, outputs = [], [], []
    for node in nodes:
        inputs = [f"{PLACEHOLDER}{node.name}.{i}" for i in range(len(node.inputs))]
        results = [f"{node.name}.{i}" for i in range(len(node.outputs))]
        attributes = [_field(1, key) + _field(4, text) + _field(20, STRING) for key, text in node.fields]
        attributes.append(_field(1, "plugin_version") + _field(4, node.version) + _field(20, STRING))
        attributes.append(_field(1, "plugin_namespace") + _field(4, node.domain) + _field(20, STRING))
        parts.append(
            b"".join(_field(1, name) for name in inputs)
            + b"".join(_field(2, name) for name in results)
            + _field(3, node.name)
            + _field(4, node.op)
            + b"".join(_field(5, attribute) for attribute in attributes)
            + _field(7, node.domain)
        )
        initializers += [_tensor(name, dtype, rank) for name, (dtype, rank) in zip(inputs, node.inputs, strict=True)]
        outputs.append(_field(1, results[0]) + _field(2, _field(1, _field(1, TYPES[node.outputs[0]][0]))))
    graph = (
        b"".join(_field(1, part) for part in parts)
        + _field(2, "plugins")
        + b"".join(_field(5, tensor) for tensor in initializers)
        + b"".join(_field(12, output) for output in outputs)
    )
    domains = ["", *dict.fromkeys(node.domain for node in nodes)]
    opsets = b"".join(_field(8, _field(1, domain) + _field(2, 1 if domain else OPSET)) for domain in domains)
    return _field(1, IR_VERSION) + _field(7, graph) + opsets


def _tensor(name: str, dtype: str, rank: int) -> bytes:
    """Zeros of the smallest shape of that rank."""
    number, size = TYPES[dtype]
    shape = [1] * rank
    dims = b"".join(_field(1, dim) for dim in shape)
    return dims + _field(2, number) + _field(8, name) + _field(9, bytes(math.prod(shape) * size))


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field in protobuf's wire format: a varint, or bytes with their length before them."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


class _LinkMap(ctypes.Structure):
    """The public part of link.h's `struct link_map`, which is what glibc's dlopen returns a pointer to."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_void_p))


@contextlib.contextmanager
def _unversioned_library(trt: Any) -> Iterator[None]:
    """The parser of TensorRT-RTX opens "libtensorrt_rtx.so", a name that its wheel does not ship (it has "….so.1"),
    and ends the process where it fails. For the time of a parse, the loaded library answers to that name."""
    wanted = "libtensorrt_rtx.so"
    if not trt.__name__.startswith("tensorrt_rtx") or _is_loaded(wanted):
        yield
        return
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = [line.split(None, 5)[5].strip() for line in maps if "/libtensorrt_rtx.so" in line]
    if not paths:
        raise BuildError("libtensorrt_rtx is not loaded", hint="pip install tensorrt-rtx")
    loaded = ctypes.CDLL(paths[0], mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    entry = _LinkMap.from_address(loaded._handle)
    name, stand_in = entry.name, ctypes.create_string_buffer(wanted.encode())
    if name is None or os.path.realpath(ctypes.string_at(name)) != os.path.realpath(paths[0].encode()):
        raise BuildError("this C library is not glibc", hint="set the lowerings under stages.build to native")
    entry.name = ctypes.addressof(stand_in)
    try:
        if not _is_loaded(wanted):
            raise BuildError(
                f"TensorRT-RTX's parser would not find {wanted}",
                hint=f"put a link of that name to {paths[0]} in a folder of LD_LIBRARY_PATH",
            )
        yield
    finally:
        entry.name = name


def _is_loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
