"""A thin writer over INetworkDefinition: one short method per operation, every layer and tensor named by the caller.

A layer's name is its place in the model ("layers.3.attention.qkv.dequantize"), and its output tensor has the same name:
nothing depends on the names that TensorRT makes up, which change with the order of building.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
class Graph:
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

    def at(self, place: str) -> Graph:
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

    # Arithmetic

    def elementwise(self, name: str, a: Tensor, b: Tensor, op: str) -> Tensor:
        """`op` is a member of ElementWiseOperation: SUM, PROD, GREATER…"""
        return self._add(name, self.network.add_elementwise(a, b, getattr(self.trt.ElementWiseOperation, op)))

    def sum(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(name, a, b, "SUM")

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(name, a, b, "PROD")

    def unary(self, name: str, x: Tensor, op: str) -> Tensor:
        return self._add(name, self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)))

    def sigmoid(self, name: str, x: Tensor) -> Tensor:
        return self._add(name, self.network.add_activation(x, self.trt.ActivationType.SIGMOID))

    def cast(self, name: str, x: Tensor, dtype: str) -> Tensor:
        """`x` in `dtype`; no layer where it has that type already."""
        return x if x.dtype == self.type(dtype) else self._add(name, self.network.add_cast(x, self.type(dtype)))

    def reduce(self, name: str, x: Tensor, op: str, axis: int, *, keep: bool) -> Tensor:
        return self._add(name, self.network.add_reduce(x, getattr(self.trt.ReduceOperation, op), 1 << axis, keep))

    def softmax(self, name: str, x: Tensor, axis: int) -> Tensor:
        layer = self.network.add_softmax(x)
        layer.axes = 1 << axis
        return self._add(name, layer)

    def matmul(self, name: str, a: Tensor, b: Tensor, *, transpose: bool = False) -> Tensor:
        """a @ b, or a @ bᵀ over the last two dimensions; leading ones broadcast."""
        op = self.trt.MatrixOperation
        second = op.TRANSPOSE if transpose else op.NONE
        return self._add(name, self.network.add_matrix_multiply(a, op.NONE, b, second))

    def dequantize(self, name: str, x: Tensor, scale: Tensor) -> Tensor:
        """One scale per block; the result has the scale's type. The block follows from the two shapes: the builder
        refuses INT4 where it is set ("Blockwise dequantization requires input type to be int8 …")."""
        return self._add(name, self.network.add_dequantize(x, scale, scale.dtype))

    def dequantize_as_model(
        self, name: str, x: Tensor, scale: Tensor, *, block: Sequence[int] | None = None, axis: int | None = None
    ) -> Tensor:
        """8-bit numbers to the model's type: one float32 scale per block of that many elements of each dimension, per
        index of `axis`, or for all."""
        layer = self.network.add_dequantize(x, scale, self.type(self.dtype))
        if block is not None:
            layer.block_shape = tuple(block)
        if axis is not None:
            layer.axis = axis
        return self._add(name, layer)

    def quantize(self, name: str, x: Tensor, scale: Tensor, dtype: str) -> Tensor:
        """`x` in steps of one float32 number, as "fp8" or "int8"."""
        return self._add(name, self.network.add_quantize(x, scale, self.type(dtype)))

    # Shapes and indices

    def reshape(
        self, name: str, x: Tensor, shape: Sequence[int] | None = None, *, first: Sequence[int] | None = None
    ) -> Tensor:
        """Transpose by `first`, then reshape: 0 keeps a size, -1 takes what is left."""
        layer = self.network.add_shuffle(x)
        if first is not None:
            layer.first_transpose = self.trt.Permutation(list(first))
        if shape is not None:
            layer.reshape_dims = tuple(shape)
        return self._add(name, layer)

    def gather(self, name: str, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        return self._add(name, self.network.add_gather(x, indices, axis))

    def gather_elements(self, name: str, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        """As torch.gather: the result has the indices' shape."""
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.ELEMENT)
        layer.axis = axis
        return self._add(name, layer)

    def slice(self, name: str, x: Tensor, axis: int, start: int, size: int) -> Tensor:
        """`size` entries of one dimension from `start` on."""
        layer = self.network.add_slice(x, (start,), (size,), (1,))
        layer.axes = (axis,)
        return self._add(name, layer)

    def concatenate(self, name: str, parts: Sequence[Tensor], axis: int) -> Tensor:
        layer = self.network.add_concatenation(list(parts))
        layer.axis = axis
        return self._add(name, layer)

    def shape(self, name: str, x: Tensor) -> Tensor:
        return self._add(name, self.network.add_shape(x))

    def count_up(self, name: str, length: Tensor) -> Tensor:
        """0, 1, 2, … as int32; `length` is an int64 tensor of one element."""
        layer = self.network.add_fill((1,), self.trt.FillOperation.LINSPACE, self.trt.int32)
        layer.set_input(0, length)
        layer.set_input(1, self.number(f"{name}.from", 0, "int32"))
        layer.set_input(2, self.number(f"{name}.step", [1], "int32"))
        return self._add(name, layer)

    def topk(self, name: str, x: Tensor, k: int, axis: int) -> tuple[Tensor, Tensor]:
        """Values and int32 indices of the k largest."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, k, 1 << axis)
        layer.name = self.prefix + name
        tensors = []
        for index, part in enumerate(("values", "indices")):
            tensor = self._register(f"{self.prefix}{name}.{part}", layer.get_output(index))
            tensor.name = f"{self.prefix}{name}.{part}"
            tensors.append(tensor)
        return tensors[0], tensors[1]

    def one_hot(self, name: str, indices: Tensor, depth: int) -> Tensor:
        """float32, with a new last dimension of `depth`."""
        values = self.number(f"{name}.values", [0, 1], "float32")
        size = self.number(f"{name}.depth", depth, "int32")
        return self._add(name, self.network.add_one_hot(indices, values, size, len(indices.shape)))

    def identity(self, name: str, x: Tensor) -> Tensor:
        return self._add(name, self.network.add_identity(x))

    # What attention needs

    def rotate(
        self, name: str, x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, *, interleaved: bool
    ) -> Tensor:
        """RoPE of x [B, heads, S, D] at positions [B, S]."""
        layer = self.network.add_rotary_embedding(x, *tables, interleaved, x.shape[-1])
        layer.set_input(3, positions)
        return self._add(name, layer)

    def update_cache(self, name: str, pool: Tensor, rows: Tensor, write_indices: Tensor, lengths: Tensor) -> Tensor:
        """Appends packed rows [T, heads, D] to the blocks of a pool, in place."""
        layer = self.network.add_kv_cache_update(pool, rows, write_indices, self.trt.KVCacheMode.LINEAR)
        layer.update_form = self.trt.AttentionIOForm.PACKED_NHD
        layer.update_lengths = lengths
        return self._add(name, layer)

    def attention(self, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, decomposable: bool) -> Tensor:
        """softmax(q kᵀ, masked) v over padded [B, heads, rows, D]."""
        norm, causal = self.trt.AttentionNormalizationOp.SOFTMAX, self.trt.CausalMaskKind.NONE
        layer = self.network.add_attention_v2(q, k, v, norm, causal)
        layer.mask = mask
        layer.decomposable = decomposable
        return self._add(name, layer)

    # What several ranks do together

    def all_reduce(self, name: str, x: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum of every rank's `x`; no layer where there are not several."""
        return x if len(ranks) < 2 else self._collective(name, x, "ALL_REDUCE", "SUM", ranks)

    def all_gather(self, name: str, x: Tensor, ranks: Sequence[int]) -> Tensor:
        """Every rank's `x`, one below the other along the first dimension."""
        return self._collective(name, x, "ALL_GATHER", "NONE", ranks)

    def all_to_all(self, name: str, x: Tensor, ranks: Sequence[int]) -> Tensor:
        """x [ranks, …] → what each rank had at this one's place, [ranks, …]."""
        return self._collective(name, x, "ALL_TO_ALL", "NONE", ranks)

    def _collective(self, name: str, x: Tensor, op: str, reduce: str, ranks: Sequence[int]) -> Tensor:
        operation, reduction = getattr(self.trt.CollectiveOperation, op), getattr(self.trt.ReduceOperation, reduce)
        group = np.asarray(ranks, dtype=np.int64)
        layer = self.network.add_dist_collective(x, operation, reduction, -1, group)  # -1: no root
        if layer is not None:
            layer.num_ranks = len(ranks)
            # TensorRT gives nothing else of such a layer back.
            attributes = {"op": op.lower(), "reduce": reduce.lower(), "ranks": list(ranks)}
            layer.metadata = json.dumps(attributes, sort_keys=True)
        return self._add(name, layer)

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
