"""A thin writer over INetworkDefinition: one short method per operation, every layer and tensor named by the caller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.network.writer import Tensor, Writer

__all__ = ["Graph", "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph(Writer):
    """Writer's, with the operations."""

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
