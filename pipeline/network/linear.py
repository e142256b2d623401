"""Linear layers: y = x Wᵀ + b in 16 bits, or W dequantized from INT4 or from FP8 blocks inside the graph.

A layer's place in the graph is its tensor's name in the engine checkpoint without "transformer.", so that a weight, its
layers and its constants are found under one name.
"""

from __future__ import annotations

import math

from pipeline.checkpoint.layouts.scales import BLOCK, BLOCK_SCALES, PRESCALE, WEIGHT_SCALES
from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.network.graph import Graph, Tensor
from pipeline.network.weights import BlockWeight, Weights


def checkpoint_name(g: Graph, name: str) -> str:
    """The engine checkpoint's name of what stands at `name` below the graph's place."""
    return f"transformer.{g.prefix}{name}"


def linear(
    g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int, *, bias: bool
) -> Tensor:
    """x [T, in] → [T, out] in the model's type. Raises CheckpointError where the checkpoint has a bias and should not.

    INT4: the constant is [in, out] with one scale per `group` inputs, the form whose dequantization TensorRT fuses into
    the GEMM, and the input is first multiplied by AWQ's scale where that was not folded (arXiv 2306.00978, §3.2).
    """
    base, at = checkpoint_name(g, name), g.at(name)
    if weights.is_int4(base):
        quantized = weights.read_int4(base, out_features, in_features)
        if quantized.prescale is not None:
            scale = at.constant(PRESCALE, quantized.prescale, (1, in_features))
            x = at.product("prescaled", x, scale)
        packed = at.int4("weight", quantized.packed)
        scales = at.constant(WEIGHT_SCALES, quantized.scales)
        weight = at.dequantize("dequantize", packed, scales)
    else:
        weight = plain_weight(at, weights, base, out_features, in_features)
    transpose = not weights.is_int4(base)
    if not bias:
        weights.forbid(f"{base}.bias")
        return g.matmul(name, x, weight, transpose=transpose)
    y = at.matmul("product", x, weight, transpose=transpose)
    offset = at.constant("bias", weights.read(f"{base}.bias", (out_features,)), (1, out_features))
    return g.sum(name, y, offset)


def plain_weight(at: Graph, weights: Weights, base: str, out_features: int, in_features: int) -> Tensor:
    """W [out, in] of a linear that is not INT4, in the model's type. FP8 blocks are dequantized by the engine at every
    step: they save memory, not time."""
    if not weights.is_fp8(base):
        return at.constant("weight", weights.read(f"{base}.weight", (out_features, in_features)))
    return dequantized(at, weights.read_blocks(base, out_features, in_features), out_features, in_features)


def dequantized(at: Graph, blocks: BlockWeight, out_features: int, in_features: int) -> Tensor:
    """W [out, in] or, of a stack, [E, out, in], without what was added to make its blocks whole."""
    stored = at.constant("weight", blocks.weight)
    rank = len(blocks.weight.shape)
    # TensorRT does not take one scale for blocks ("ScaleMode is illegal"), only for the whole.
    single = math.prod(blocks.scales.shape) == 1
    scales = at.constant(BLOCK_SCALES, blocks.scales, (1,) if single else None)
    block = None if single else (1,) * (rank - 2) + (BLOCK, BLOCK)
    weight = at.dequantize_fp8("dequantize", stored, scales, block)
    for axis, size, name in ((rank - 2, out_features, "rows"), (rank - 1, in_features, "columns")):
        if blocks.weight.shape[axis] != size:
            weight = at.slice(f"{name}_of_weight", weight, axis, 0, size)
    return weight


def linear_float32(g: Graph, weights: Weights, name: str, x: Tensor, out_features: int, in_features: int) -> Tensor:
    """x [T, in] → [T, out] in float32 whatever the stored type: for routers, which transformers runs in float32."""
    at, stored = g.at(name), tuple(MODEL_DTYPES.values())
    raw = weights.read(f"{checkpoint_name(g, name)}.weight", (out_features, in_features), dtypes=stored)
    weight = at.cast("weight_float32", at.constant("weight", raw), "float32")
    return g.matmul(name, at.cast("input_float32", x, "float32"), weight, transpose=True)
