"""RMSNorm from primitives (TensorRT has none of its own; it fuses these into one kernel)."""

from __future__ import annotations

from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import checkpoint_name
from pipeline.network.weights import Weights


def rms_norm(g: Graph, weights: Weights, name: str, x: Tensor, width: int, eps: float) -> Tensor:
    """x [T, width] / sqrt(mean(x²) + eps) in float32, back in the model's type, then times the weight: transformers'
    order, which matters once the types are 16-bit."""
    at = g.at(name)
    wide = at.cast("float32", x, "float32")
    mean = at.reduce("mean", at.product("square", wide, wide), "AVG", 1, keep=True)
    root = at.unary("root", at.sum("variance", mean, at.number("eps", [[eps]], "float32")), "SQRT")
    normal = at.cast("normal", at.elementwise("ratio", wide, root, "DIV"), g.dtype)
    raw = weights.read(f"{checkpoint_name(g, name)}.weight", (width,))
    return g.product(name, normal, at.constant("weight", raw, (1, width)))
