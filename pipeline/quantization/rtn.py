"""Round to nearest: every group by its own maximum. Needs no calibration, and is what other methods are judged by.

Or within a range of each group that calibration chooses, as AWQ does without its scale.
"""

from __future__ import annotations

from pipeline.quantization import awq
from pipeline.quantization.problem import Choice, Problem


def choose(problem: Problem) -> Choice:
    """No scale, no clipping, nothing measured."""
    return Choice()


def choose_clipped(problem: Problem) -> Choice:
    """No scale; each group's range where that pays, see `clipping`."""
    return awq.apply_scale(problem, None, None, clip=True)[0] if problem.inputs else Choice()
