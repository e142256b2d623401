"""Linear layers: y = x Wᵀ + b, W in the model's type or dequantized inside the graph (weights/ has the formats).

Over several ranks a linear is cut along its outputs, and then is one of its own size on each, or along its inputs, and
then each rank has one part of the sum (Megatron-LM, arXiv 1909.08053 §3).

A layer's place in the graph is its tensor's name in the engine checkpoint without "transformer.", so that a weight, its
layers and its constants are found under one name.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.network.graph import Graph, Tensor
from pipeline.network.weights import Weights, lower, multiply


def checkpoint_name(g: Graph, name: str) -> str:
    """The engine checkpoint's name of what stands at `name` below the graph's place."""
    return f"transformer.{g.prefix}{name}"


def linear(
    g: Graph,
    weights: Weights,
    name: str,
    x: Tensor,
    out_features: int,
    in_features: int,
    *,
    bias: bool,
    ranks: Sequence[int] = (),
) -> Tensor:
    """x [T, in] → [T, out] in the model's type. `ranks`: those that have a part of the sum each, this one among them;
    the bias is added once. Raises CheckpointError where the checkpoint has a bias and should not."""
    y = multiply_linear(g, weights, name, x, out_features, in_features, bias=bias)
    y = g.all_reduce(f"{name}.all_reduce", y, ranks)
    return add_bias(g, weights, name, y, out_features) if bias else y


def multiply_linear(
    g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int, *, bias: bool
) -> Tensor:
    """x Wᵀ, where `bias` says whether `add_bias` follows."""
    base = checkpoint_name(g, name)
    operand = lower(g.at(name), weights, base, out_features, in_features)
    if bias:
        return multiply(g.at(name), "product", x, operand)
    weights.forbid(f"{base}.bias")
    return multiply(g, name, x, operand)


def add_bias(g: Graph, weights: Weights, name: str, y: Tensor, out_features: int) -> Tensor:
    raw = weights.read(f"{checkpoint_name(g, name)}.bias", (out_features,))
    return g.sum(name, y, g.at(name).constant("bias", raw, (1, out_features)))


def linear_float32(g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int) -> Tensor:
    """x [T, in] → [T, out] in float32 whatever the stored type: for routers, which transformers runs in float32."""
    at, stored = g.at(name), tuple(MODEL_DTYPES.values())
    raw = weights.read(f"{checkpoint_name(g, name)}.weight", (out_features, in_features), dtypes=stored)
    weight = at.cast("weight_float32", at.constant("weight", raw), "float32")
    return g.matmul(name, at.cast("input_float32", x, "float32"), weight, transpose=True)
