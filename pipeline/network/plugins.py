"""How plugins enter a network: `Plugins.announce` before anything else, then `Plugins.add`, one by one.

`tensorrt` adds a plugin where it stands; `tensorrt_rtx` must be told of all of them first (see `skeleton`). Nobody else
knows the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import BuildError
from pipeline.network.skeleton import SkeletonNode, parse_skeleton
from plugins.operation import Operation
from plugins.tensorrt_plugin import NAMESPACE, OPERATION, VERSION, make_plugin, register_plugins


@dataclass(slots=True)
class Plugins:
    """The plugins of one network. `objects` are TensorRT's, by layer name: whoever builds keeps them alive, and gives
    them their kernels (plugins.tensorrt_plugin.carry)."""

    trt: Any
    network: Any
    objects: dict[str, Any] = field(default_factory=dict)
    _layers: dict[str, Any] = field(default_factory=dict)

    def announce(self, operations: Mapping[str, Operation]) -> None:
        """Every plugin that the network will have, by the name of its layer. The network is still empty."""
        if not operations:
            return
        register_plugins(self.trt)
        if hasattr(self.network, "add_plugin_v3"):
            return
        nodes = [
            SkeletonNode(
                name=name,
                op=operation.NAME,
                domain=NAMESPACE,
                version=VERSION,
                inputs=tuple(
                    (dtype, rank) for dtype, (_, rank) in zip(operation.input_types(), operation.INPUTS, strict=False)
                ),
                outputs=tuple(output.dtype for output in operation.outputs()),
                fields=((OPERATION, operation.to_json()),),
            )
            for name, operation in operations.items()
        ]
        layers = parse_skeleton(self.trt, self.network, nodes)
        self._layers = {node.name: layer for node, layer in zip(nodes, layers, strict=True)}

    def add(self, name: str, operation: Operation, inputs: Sequence[Any]) -> Any:
        """The layer, with its inputs. Raises BuildError where TensorRT refuses it."""
        if hasattr(self.network, "add_plugin_v3"):
            plugin = make_plugin(self.trt, operation)
            layer = self.network.add_plugin_v3(list(inputs), [], plugin)
        else:
            layer = self._layers.pop(name)
            plugin = layer.plugin
            if plugin.operation != operation:
                raise ValueError(f"{name} was announced as {plugin.operation}, not {operation}")  # a writer's mistake
            for index, tensor in enumerate(inputs):
                layer.set_input(index, tensor)
        if layer is None:
            raise BuildError(f"TensorRT refused plugin {name}", hint="its log says why")
        self.objects[name] = plugin
        return layer
