"""The gated MLP (SwiGLU): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.linear import linear


def gated_mlp(g: Graph, context: Context, x: Tensor, columns: int) -> Tensor:
    """x [T, H] → [T, H], of so many columns on this rank."""
    a, ranks = context.architecture, context.spec.rank.tensor_group
    gated = gate(g, context, x, columns)
    return linear(g, context.weights, "proj", gated, a.hidden_size, columns, bias=a.mlp_bias, ranks=ranks)


def gate(g: Graph, context: Context, x: Tensor, columns: int) -> Tensor:
    """x [T, H] → [T, columns], what down_proj multiplies. The checkpoint's names are TensorRT-LLM's: `fc` is HF's
    gate_proj, `gate` its up_proj."""
    a, weights = context.architecture, context.weights
    opened = linear(g, weights, "fc", x, columns, a.hidden_size, bias=a.mlp_bias)
    up = linear(g, weights, "gate", x, columns, a.hidden_size, bias=a.mlp_bias)
    return swiglu(g, opened, up)


def swiglu(g: Graph, gate: Tensor, up: Tensor) -> Tensor:
    silu = g.product("silu", gate, g.sigmoid("sigmoid", gate))
    return g.product("gated", silu, up)
