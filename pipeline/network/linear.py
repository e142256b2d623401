"""Linear layers: y = x Wᵀ + b, W in the model's type or dequantized inside the graph (weights/ has the formats).

A layer's place in the graph is its tensor's name in the engine checkpoint without "transformer.", so that a weight, its
layers and its constants are found under one name.
"""

from __future__ import annotations

from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.network.graph import Graph, Tensor
from pipeline.network.weights import Weights, lower, multiply


def checkpoint_name(g: Graph, name: str) -> str:
    """The engine checkpoint's name of what stands at `name` below the graph's place."""
    return f"transformer.{g.prefix}{name}"


def linear(
    g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int, *, bias: bool
) -> Tensor:
    """x [T, in] → [T, out] in the model's type. Raises CheckpointError where the checkpoint has a bias and should
    not."""
    base, at = checkpoint_name(g, name), g.at(name)
    operand = lower(at, weights, base, out_features, in_features)
    if not bias:
        weights.forbid(f"{base}.bias")
        return multiply(g, name, x, operand)
    y = at.matmul("product", operand.prepare(at, x), operand.weight, transpose=operand.transposed)
    offset = at.constant("bias", weights.read(f"{base}.bias", (out_features,)), (1, out_features))
    return g.sum(name, y, offset)


def linear_float32(g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int) -> Tensor:
    """x [T, in] → [T, out] in float32 whatever the stored type: for routers, which transformers runs in float32."""
    at, stored = g.at(name), tuple(MODEL_DTYPES.values())
    raw = weights.read(f"{checkpoint_name(g, name)}.weight", (out_features, in_features), dtypes=stored)
    weight = at.cast("weight_float32", at.constant("weight", raw), "float32")
    return g.matmul(name, at.cast("input_float32", x, "float32"), weight, transpose=True)
