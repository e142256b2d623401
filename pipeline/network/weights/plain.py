"""Weights in the model's own type."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.network.derived import Constant
from pipeline.network.graph import Graph
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.source import Weights


def lower(
    at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int, stacked: bool
) -> Operand:
    """W [out, in]. A stack is copied together, a single one is not copied."""
    shape = (out_features, in_features)
    names = [f"{base}.weight" for base in bases]
    constant: Constant = weights.read_stack(names, shape) if stacked else weights.read(names[0], shape)
    return Operand(weight=at.constant("weight", constant), transposed=True)
