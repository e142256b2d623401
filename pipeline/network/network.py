"""Builds a network: the one place where an `INetworkDefinition` is filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.network.decoder import write_decoder
from pipeline.network.graph import Graph
from pipeline.network.placeholders import Placeholder, Placeholders
from pipeline.network.plugins import Plugins
from pipeline.network.spec import NetworkSpec
from pipeline.network.weights import Weights
from pipeline.sharding.slices import slice_source

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import RawTensor, TensorSource
    from pipeline.network.placeholders import Visitor

__all__ = ["Network", "NetworkSpec", "build_network", "build_stripped_network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A filled network definition. It owns the memory that TensorRT's constants point to: keep it until the build or
    the last step is over. `placeholders` are the constants that it only names, `plugins` TensorRT's plugin objects by
    layer, which are yet to be given their kernels."""

    trt: Any
    network: Any
    spec: NetworkSpec
    architecture: Architecture
    constants: dict[str, RawTensor]
    placeholders: dict[str, Placeholder] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)


def build_network(
    trt: Any, network: Any, spec: NetworkSpec, architecture: Architecture, source: TensorSource
) -> Network:
    """Writes the model into an empty `network` of the TensorRT module `trt` (tensorrt_rtx or tensorrt).

    `source` is the whole engine checkpoint, also where `spec` says that the network is one of several ranks': it is
    sliced as it is read. 16-bit weights are not copied, except stacked experts, MLA's kv_b_proj, and where ranks share
    a linear's inputs. Raises CheckpointError for a missing or misshapen tensor, CompatibilityError for what cannot be
    expressed or divided.
    """
    return _write(trt, network, spec, architecture, slice_source(source, architecture, spec.rank))


def build_stripped_network(
    trt: Any,
    network: Any,
    spec: NetworkSpec,
    architecture: Architecture,
    source: TensorSource,
    *,
    visit: Visitor | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Network:
    """As `build_network`, with the checkpoint's constants as named placeholders, whose weights a refit brings.

    Reads every weight once, in the network's order, and holds one constant at a time, or one expert of a stack. `visit`
    is shown each, whole; `on_bytes` is told of their bytes as they pass.
    """
    taken = Placeholders(slice_source(source, architecture, spec.rank), visit, on_bytes)
    return _write(trt, network, spec, architecture, taken.source, taken)


def _write(
    trt: Any,
    network: Any,
    spec: NetworkSpec,
    architecture: Architecture,
    source: TensorSource,
    taken: Placeholders | None = None,
) -> Network:
    plugins = Plugins(trt, network)
    graph = Graph(trt=trt, network=network, dtype=spec.dtype, placeholders=taken, plugins=plugins)
    write_decoder(graph, architecture, spec, Weights(source=source, dtype=spec.dtype))
    return Network(
        trt=trt,
        network=network,
        spec=spec,
        architecture=architecture,
        constants=graph.constants,
        placeholders=taken.found if taken else {},
        plugins=plugins.objects,
    )
