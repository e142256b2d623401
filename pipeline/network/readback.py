"""Reads a finished `INetworkDefinition` back into a `Program`: what is read is the object that the builder compiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import CompatibilityError
from pipeline.network.kinds import KINDS, dtype_name
from pipeline.network.program import Node, Program, TensorSpec
from pipeline.network.skeleton import PLACEHOLDER

if TYPE_CHECKING:
    from pipeline.network.network import Network

__all__ = ["Node", "Program", "TensorSpec", "read_network"]


def read_network(network: Network) -> Program:
    """Every layer with its attributes and connections. Constants come from `network.constants`: TensorRT cannot give
    back the bytes of INT4, FP8 and BF16. Raises CompatibilityError for a layer of an unknown kind."""
    trt, definition = network.trt, network.network
    inputs = tuple(_spec(definition.get_input(i)) for i in range(definition.num_inputs))
    outputs = tuple(_spec(definition.get_output(i)) for i in range(definition.num_outputs))
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    # One attention is two layers: the second half is found by the tensor that joins them.
    halves = {layer.get_input(0).name: layer for layer in layers if layer.type.name == "ATTENTION_OUTPUT"}
    constant_specs: dict[str, TensorSpec] = {}
    nodes: list[Node] = []
    for layer in layers:
        kind = layer.type.name
        if kind == "CONSTANT" and layer.name.startswith(PLACEHOLDER):
            continue  # of a plugin that has its real inputs by now
        if kind == "CONSTANT":
            spec = _spec(layer.get_output(0))
            constant_specs[spec.name] = spec
        elif kind != "ATTENTION_OUTPUT":
            nodes.append(_read_node(trt, layer, kind, halves))
    unpaired = sorted(constant_specs.keys() ^ (network.constants.keys() | network.placeholders.keys()))
    if unpaired:
        raise CompatibilityError(
            f"constants {', '.join(unpaired[:3])} are in the network or among its references, not both",
            hint="write constants through the graph writer only",
        )
    return Program(
        inputs=inputs,
        outputs=outputs,
        nodes=tuple(_in_order(nodes, {spec.name for spec in inputs} | constant_specs.keys())),
        constants=dict(network.constants),
        absent={name: placeholder.digest for name, placeholder in network.placeholders.items()},
        constant_specs=constant_specs,
    )


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tensor.name, dtype_name(tensor.dtype), tuple(int(size) for size in tensor.shape))


def _read_node(trt: Any, layer: Any, kind: str, halves: Mapping[str, Any]) -> Node:
    if kind not in KINDS:
        raise CompatibilityError(
            f"layer {layer.name} is of kind {kind}, which cannot be read back",
            hint="add it to pipeline/network/kinds.py",
        )
    layer.__class__ = getattr(trt, KINDS[kind].layer)  # the binding hands every layer out as its base class
    attributes = {key: read(layer) for key, read in KINDS[kind].attributes.items()}
    name, source = layer.name, layer
    if kind == "ATTENTION_INPUT":
        _refuse_lengths(layer.attention)
        kind, name, source = "ATTENTION", layer.attention.name, halves[layer.get_output(0).name]
    if kind == "PLUGIN_V3":
        kind, attributes = layer.plugin.operation.NAME, layer.plugin.operation.attributes()
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    return Node(
        kind=kind.lower(),
        name=name,
        inputs=tuple(None if tensor is None else tensor.name for tensor in inputs),
        outputs=tuple(_spec(source.get_output(i)) for i in range(source.num_outputs)),
        attributes=attributes,
    )


def _refuse_lengths(attention: Any) -> None:
    """Inputs that a node has no slot for must not be lost: a mask says the same as lengths, and is proved."""
    for extra in ("query_lengths", "key_value_lengths", "normalization_quantize_scale"):
        if getattr(attention, extra) is not None:
            raise CompatibilityError(
                f"attention {attention.name} has {extra}, which cannot be read back", hint="use an explicit mask"
            )


def _in_order(nodes: list[Node], ready: set[str]) -> Iterator[Node]:
    """Topological order that keeps the writer's order wherever it is one already."""
    pending = nodes
    while pending:
        later = []
        for node in pending:
            if all(name is None or name in ready for name in node.inputs):
                ready.update(output.name for output in node.outputs)
                yield node
            else:
                later.append(node)
        if len(later) == len(pending):
            raise CompatibilityError(f"layer {later[0].name} waits for a tensor that nothing makes")
        pending = later
