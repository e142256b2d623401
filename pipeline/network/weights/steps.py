"""Scales of 8-bit weights and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.layouts.scales import ACTIVATION_SCALES, WEIGHT_SCALES
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.network.derived import Derived
from pipeline.network.graph import Graph, Tensor
from pipeline.network.weights.source import Weights


def read_scales(weights: Weights, base: str, kind: str, shape: tuple[int, ...]) -> RawTensor:
    """F32. Raises CheckpointError for a scale that is not finite and positive, which TensorRT refuses too."""
    raw = weights.read(f"{base}.{kind}", shape, dtypes=("F32",))
    values = raw.data.view(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"tensor {base}.{kind} holds scales that are not finite and positive", hint="quantize the checkpoint again"
        )
    return raw


def lower_input_step(at: Graph, weights: Weights, bases: Sequence[str]) -> Tensor:
    """The one step that the input of all these linears is rounded in: float32 [1].

    Held by the network itself, even where weights come later: TensorRT wants to know it. Raises as `read_input_step`.
    """
    return at.number(ACTIVATION_SCALES, [read_input_step(weights, bases)], "float32")


def read_input_step(weights: Weights, bases: Sequence[str]) -> float:
    """Raises CompatibilityError where experts of a stack have several."""
    steps = {float(read_scales(weights, base, ACTIVATION_SCALES, (1,)).data.view(np.float32)[0]) for base in bases}
    if len(steps) > 1:
        raise CompatibilityError(
            f"experts of {bases[0].rsplit('.', 2)[0]} have {len(steps)} different {ACTIVATION_SCALES}s",
            hint="quantize the checkpoint again: a layer's experts share one",
        )
    return steps.pop()


def read_stack_scales(weights: Weights, bases: Sequence[str]) -> Derived:
    """The scales of FP8 weights of a stack, F32 [E, 1, 1]."""
    for base in bases:  # refused now, not when the bytes are made
        weights.check(f"{base}.{WEIGHT_SCALES}", (1,), dtypes=("F32",))
    return Derived(
        "F32", (len(bases), 1, 1), lambda: (read_scales(weights, base, WEIGHT_SCALES, (1,)).data for base in bases)
    )


def lower_stack_scales(
    at: Graph, weights: Weights, bases: Sequence[str], kind: str, width: int
) -> tuple[Tensor, Tensor]:
    """The largest scale of a stack, float32 [1], and each one's part of it, [E, 1, width].

    The largest, so that no product is larger than the widest weights could make it.
    """
    largest = max(float(read_scales(weights, base, kind, (width,)).data.view(np.float32).max()) for base in bases)

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        for base in bases:
            values = weights.read(f"{base}.{kind}", (width,), dtypes=("F32",)).data.view(np.float32)
            yield (values / np.float32(largest)).view(np.uint8)

    factors = Derived("F32", (len(bases), 1, width), pieces)
    return at.number(f"{kind}_of_all", [largest], "float32"), at.constant(kind, factors)
