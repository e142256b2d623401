"""What a quantization method is asked, and what it answers: one scale group at a time.

Shapes: O output features, I input features, g input features per group, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.quantization.int4_grids import Grid, symmetric
from pipeline.quantization.moments import Factors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from pipeline.quantization.capture import Inputs
    from pipeline.quantization.moments import Moment
    from pipeline.quantization.rules import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The linears of one scale group.

    `read(name)` gives a weight [O, I] as float32; one at a time, since a routed layer has hundreds.
    `mean_abs` and `max_abs` float32 [I] of the shared input (None: the method measures nothing). `inputs` holds, for
    each linear that calibration reached, the rows that *it* was fed (an expert's own ones).
    `realise(s)` is the scale that the checkpoint can really hold for a wanted s [I] (rounded by the norm or the vector
    that carries it), or None where it would overflow. `grid`: what INT4 linears are rounded to. `moments`: the second
    moments of each linear's own input, for methods that ask for them, and `factors` makes of them what GPTQ needs.
    """

    name: str
    linears: tuple[Linear, ...]
    read: Callable[[str], Tensor]
    mean_abs: Tensor | None
    max_abs: Tensor | None
    inputs: Mapping[str, Inputs]
    realise: Callable[[Tensor], Tensor | None]
    scale_dtype: torch.dtype
    clip: bool
    grid: Grid = symmetric
    moments: Mapping[str, Moment] = field(default_factory=dict)
    factors: Factors = field(default_factory=Factors)


@dataclass(frozen=True, slots=True)
class Loss:
    """Squared output error over squared output on the sampled rows: rounded to nearest, and as chosen."""

    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How one linear's scaled weight becomes stored values, where that is not plain rounding to nearest.

    `limits` [O, I/g] bounds the weights of a group (absent: its own amax). `round` gives an INT4 or FP8 linear's
    (q [O, I], its scales) for its scaled weight [O, I] in place of rounding to nearest; called when the linear is
    written, so that only one is held. `input_amax`: the largest |input| to expect, for static scales.
    """

    limits: Tensor | None = None
    round: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    input_amax: float | None = None


PLAIN = Treatment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`scale` [I] multiplies the columns of every linear of the group (None: 1); `treatments` by linear."""

    alpha: float | None = None
    scale: Tensor | None = None
    treatments: Mapping[str, Treatment] = field(default_factory=dict)
    losses: Mapping[str, Loss] = field(default_factory=dict)
