"""Builds a network: the one place where an `INetworkDefinition` is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.network.decoder import write_decoder
from pipeline.network.graph import Graph
from pipeline.network.spec import NetworkSpec
from pipeline.network.weights import Weights

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import RawTensor, TensorSource

__all__ = ["Network", "NetworkSpec", "build_network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A filled network definition. It owns the memory that TensorRT's constants point to: keep it until the build or
    the last step is over."""

    trt: Any
    network: Any
    spec: NetworkSpec
    architecture: Architecture
    constants: dict[str, RawTensor]


def build_network(
    trt: Any, network: Any, spec: NetworkSpec, architecture: Architecture, source: TensorSource
) -> Network:
    """Writes the model into an empty `network` of the TensorRT module `trt` (tensorrt_rtx or tensorrt).

    16-bit weights are not copied, except stacked experts and MLA's kv_b_proj. Raises CheckpointError for a missing or
    misshapen tensor, CompatibilityError for what cannot be expressed.
    """
    graph = Graph(trt=trt, network=network, dtype=spec.dtype)
    write_decoder(graph, architecture, spec, Weights(source=source, dtype=spec.dtype))
    return Network(trt=trt, network=network, spec=spec, architecture=architecture, constants=graph.constants)
