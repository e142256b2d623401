"""What a linear's input is multiplied by, where the scale of its channels was not folded into what comes before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.layouts.scales import PRESCALE
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.network.derived import Constant
    from pipeline.network.graph import Graph, Tensor
    from pipeline.network.weights.source import Weights


def lower_prescale(at: Graph, weights: Weights, bases: Sequence[str], in_features: int, stacked: bool) -> Tensor | None:
    """[1, in] in the model's type; of a stack [E, 1, in], or [1, 1, in] where every expert has the same; None where
    there is none. Raises CompatibilityError where only some experts have one."""
    constant = read_prescale(weights, bases, in_features, stacked)
    if constant is None:
        return None
    return at.constant(PRESCALE, constant, (constant.shape[0], 1, in_features) if stacked else (1, in_features))


def read_prescale(weights: Weights, bases: Sequence[str], in_features: int, stacked: bool) -> Constant | None:
    """As `lower_prescale`: [in], or of a stack [E, in] or [1, in]."""
    names = [f"{base}.{PRESCALE}" for base in bases]
    missing = [name for name in names if not weights.has(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise CompatibilityError(
            f"some experts of {bases[0].rsplit('.', 2)[0]} have a {PRESCALE} and some have not",
            hint="quantize all experts of a layer by one method",
        )
    first, *others = (weights.read(name, (in_features,)) for name in names)
    if not stacked:
        return first
    if all(np.array_equal(other.data, first.data) for other in others):
        return RawTensor(first.dtype, (1, in_features), first.data)
    return weights.read_stack(names, (in_features,))
