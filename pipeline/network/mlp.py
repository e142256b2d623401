"""The gated MLP (SwiGLU): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import linear
from pipeline.network.weights import Weights


def gated_mlp(g: Graph, weights: Weights, x: Tensor, hidden_size: int, intermediate_size: int, *, bias: bool) -> Tensor:
    """x [T, H] → [T, H]. The checkpoint's names are TensorRT-LLM's: `fc` is HF's gate_proj, `gate` its up_proj."""
    gate = linear(g, weights, "fc", x, intermediate_size, hidden_size, bias=bias)
    up = linear(g, weights, "gate", x, intermediate_size, hidden_size, bias=bias)
    return linear(g, weights, "proj", swiglu(g, gate, up), hidden_size, intermediate_size, bias=bias)


def swiglu(g: Graph, gate: Tensor, up: Tensor) -> Tensor:
    silu = g.product("silu", gate, g.sigmoid("sigmoid", gate))
    return g.product("gated", silu, up)
