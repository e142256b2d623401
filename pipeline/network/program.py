"""A network as plain data, without TensorRT: what the interpreter executes, the inspector shows, the digest covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint.tensors import RawTensor

FORMAT = 1  # of the dump: part of every digest


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, type ("float16", "bfloat16", "float32", "int32", "int64", "int8", "bool", "int4", "fp8") and
    shape, -1 where a step decides."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation. `kind`, the meaning of each input and the attributes are those of `kinds.KINDS`; an optional input
    that is not connected is None."""

    kind: str
    name: str
    inputs: tuple[str | None, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "inputs": list(self.inputs),
            "outputs": [output.to_json() for output in self.outputs],
            "attributes": dict(self.attributes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A network read back: nodes in an order in which every input comes before its use.

    Constants are not nodes: `constants` holds their bytes and `constant_specs` their type and shape. An INT4 constant's
    bytes are a RawTensor of type I8 whose last dimension is halved: row-major, two values per byte, the low nibble
    first, two's complement. `absent` has the digest of each constant whose bytes the network does not hold: with any,
    the program can be shown, compared and digested, but not executed.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, RawTensor]
    constant_specs: Mapping[str, TensorSpec]
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name: inputs, constants and the nodes' outputs."""
        specs = {spec.name: spec for spec in self.inputs}
        specs.update(self.constant_specs)
        specs.update({output.name: output for node in self.nodes for output in node.outputs})
        return specs

    def dump(self) -> dict[str, Any]:
        """The whole network as JSON, a constant by the digest of its bytes: equal for equal networks, whichever process
        wrote them."""
        from pipeline.digest import digest_bytes

        return {
            "format": FORMAT,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "nodes": [node.to_json() for node in self.nodes],
            "constants": [
                [*spec.to_json(), self.absent.get(name) or digest_bytes(self.constants[name].data)]
                for name, spec in sorted(self.constant_specs.items())
            ],
        }

    def digest(self) -> str:
        """Digest of `dump()`: of every layer, attribute, connection and weight."""
        from pipeline.digest import digest_json

        return digest_json(self.dump())
