"""From a linear's format to the module that lowers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.errors import CompatibilityError
from pipeline.network.graph import Graph
from pipeline.network.weights import fp8, fp8_blocks, int4, int8, plain
from pipeline.network.weights.operand import Operand
from pipeline.network.weights.source import Weights

# (place in the graph, weights, the checkpoint's names of the linears, out, in, whether they are to be one stack)
Lowering = Callable[[Graph, Weights, Sequence[str], int, int, bool], Operand]
# None: weights in the model's type.
LOWERINGS: dict[str | None, Lowering] = {
    None: plain.lower,
    "int4": int4.lower,
    "int4_fp8": int4.lower_fp8_inputs,
    "fp8": fp8.lower,
    "fp8_rows": fp8.lower_rows,
    "fp8_blocks": fp8_blocks.lower,
    "int8": int8.lower_weight_only,
    "int8_sq": int8.lower_smoothed,
}


def lower(at: Graph, weights: Weights, base: str, out_features: int, in_features: int) -> Operand:
    """The linear that the checkpoint calls `base`, written at `at`. Raises CheckpointError for tensors that do not fit
    the architecture, CompatibilityError for what has no lowering."""
    return LOWERINGS[weights.find_format(base)](at, weights, (base,), out_features, in_features, False)


def lower_stack(at: Graph, weights: Weights, bases: Sequence[str], out_features: int, in_features: int) -> Operand:
    """One linear of all experts of a layer as [E, …]. Raises CompatibilityError where they are not of one format."""
    return LOWERINGS[find_stack_format(weights, bases)](at, weights, bases, out_features, in_features, True)


def find_stack_format(weights: Weights, bases: Sequence[str]) -> str | None:
    """The one format of all these linears. Raises CompatibilityError where they have several."""
    formats = {base: weights.find_format(base) for base in bases}
    stored = formats[bases[0]]
    other = next((base for base, name in formats.items() if name != stored), None)
    if other is not None:
        raise CompatibilityError(
            f"{bases[0]} is {stored or 'not quantized'} and {other} is {formats[other] or 'not quantized'}: a layer's "
            "experts are one stack",
            hint="quantize all routed experts of a layer alike (stages.quantize: include, exclude, recipe)",
        )
    return stored
