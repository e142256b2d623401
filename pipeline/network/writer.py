"""What writing a network takes whatever the operation: names, inputs and outputs, constants, plugins.

A layer's name is its place in the model ("layers.3.attention.qkv.dequantize"), and its output tensor has the same name:
nothing depends on the names that TensorRT makes up, which change with the order of building.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.tensors import DTYPES, RawTensor
from pipeline.errors import BuildError
from pipeline.network.derived import Constant, Derived
from pipeline.network.inputs import Port
from pipeline.network.placeholders import Placeholders
from pipeline.network.plugins import Plugins
from plugins.operation import Operation

Tensor = Any  # trt.ITensor: the bindings have no types
# safetensors type -> TensorRT's attribute
_TRT_TYPES = {name: trt_name for name, (_, _, trt_name) in DTYPES.items() if trt_name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes layers into `network`. `dtype` is the model's type; `prefix` the place that names are relative to.

    `constants` keeps the bytes of every constant alive, since TensorRT only holds pointers, and is how they are read
    back (TensorRT cannot return INT4, FP8 and BF16). With `placeholders`, the checkpoint's constants go there instead,
    and TensorRT is told their names only.
    """

    trt: Any
    network: Any
    dtype: str
    prefix: str = ""
    constants: dict[str, RawTensor] = field(default_factory=dict)
    placeholders: Placeholders | None = None
    plugins: Plugins | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def at(self, place: str) -> Self:
        """The same network, with names below `place`."""
        return replace(self, prefix=f"{self.prefix}{place}.")

    def type(self, dtype: str) -> Any:
        """A type of `program.TensorSpec`'s spelling as TensorRT's."""
        return getattr(self.trt, dtype)

    def input(self, port: Port) -> Tensor:
        """A network input. Sizes of one name are declared equal, which saves the compiler kernels and checks."""
        tensor = self.network.add_input(port.name, self.type(port.dtype), port.shape)
        for dim, axis in enumerate(port.axes):
            if isinstance(axis, str):
                tensor.set_dimension_name(dim, axis)
        return self._register(port.name, tensor)

    def output(self, name: str, tensor: Tensor) -> None:
        """Marks a network output under `name`. For a tensor that already has its place's name, write `identity`."""
        if tensor.name != name:
            self._register(name, self.tensors.pop(tensor.name))
            tensor.name = name
        self.network.mark_output(tensor)

    # Constants

    def constant(self, name: str, constant: Constant, shape: Sequence[int] | None = None) -> Tensor:
        """A constant of the checkpoint, over its own memory where it has any, seen in `shape`."""
        return self._weights(name, constant, _TRT_TYPES[constant.dtype], shape or constant.shape)

    def int4(self, name: str, packed: Constant) -> Tensor:
        """An INT4 constant: `packed` is I8 with its last dimension halved, low nibble first."""
        return self._weights(name, packed, "int4", (*packed.shape[:-1], packed.shape[-1] * 2))

    def number(self, name: str, value: npt.ArrayLike, dtype: str) -> Tensor:
        """A constant of the architecture, held by the network itself; a scalar has no dimension."""
        raw = RawTensor.from_numpy(np.asarray(value, dtype=dtype))
        return self._held(name, raw, _TRT_TYPES[raw.dtype], raw.shape)

    def _weights(self, name: str, constant: Constant, dtype: str, shape: Sequence[int]) -> Tensor:
        if self.placeholders is None:
            raw = constant.make() if isinstance(constant, Derived) else constant
            return self._held(name, raw, dtype, shape)
        layer = self.network.add_constant(tuple(shape), self.trt.Weights(self.type(dtype), 0, math.prod(shape)))
        tensor = self._add(name, layer)
        named = self.network.set_weights_name(layer.weights, tensor.name)
        if not named or not self.network.mark_weights_refittable(tensor.name):
            problem = f"TensorRT takes no weights for {tensor.name} later"
            raise BuildError(problem, hint="set stages.build.weights: full")
        self.placeholders.take(tensor.name, constant, dtype, tuple(shape))
        return tensor

    def _held(self, name: str, raw: RawTensor, dtype: str, shape: Sequence[int]) -> Tensor:
        weights = self.trt.Weights(self.type(dtype), raw.data.ctypes.data, math.prod(shape))
        tensor = self._add(name, self.network.add_constant(tuple(shape), weights))
        # As the network sees it; of INT4, two values to the byte.
        seen = tuple(shape) if dtype != "int4" else raw.shape
        self.constants[tensor.name] = RawTensor(raw.dtype, seen, raw.data)
        return tensor

    # Plugins

    def announce(self, operations: Mapping[str, Operation]) -> None:
        """Every plugin to come, by the name of its layer; before anything is written."""
        if self.plugins is not None:
            self.plugins.announce(operations)

    def plugin(self, name: str, operation: Operation, inputs: Sequence[Tensor]) -> list[Tensor]:
        """An operation of `plugins`, announced before the network was written → its outputs, named name.0, name.1, …"""
        if self.plugins is None:
            raise ValueError(f"{name}: this graph was made without plugins")  # a writer's mistake
        layer = self.plugins.add(self.prefix + name, operation, inputs)
        layer.name = self.prefix + name
        outputs = []
        for index in range(layer.num_outputs):
            tensor = self._register(f"{layer.name}.{index}", layer.get_output(index))
            tensor.name = f"{layer.name}.{index}"
            outputs.append(tensor)
        return outputs

    def _add(self, name: str, layer: Any) -> Tensor:
        full_name = self.prefix + name
        if layer is None:  # the bindings log the reason and return nothing
            raise BuildError(f"TensorRT refused layer {full_name}", hint="its log says why")
        layer.name = full_name
        tensor = layer.get_output(0)
        self._register(full_name, tensor)
        tensor.name = full_name
        try:
            len(tensor.shape)  # asked for here, because only now is it known which layer is wrong
        except RuntimeError as error:
            raise BuildError(f"TensorRT refused layer {full_name}", hint="its log says why") from error
        return tensor

    def _register(self, name: str, tensor: Tensor) -> Tensor:
        # TensorRT would keep a name of its own instead of the second one, and say nothing.
        if name in self.tensors:
            raise ValueError(f"two tensors are named {name}")  # a block's mistake, not a user's
        self.tensors[name] = tensor
        return tensor
