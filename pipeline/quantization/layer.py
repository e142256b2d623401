"""One decoder layer: its scale groups put to the method as problems, the answers gathered for writing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.checkpoint.block_scales import read_weight
from pipeline.quantization.catalog import FORMATS, METHODS
from pipeline.quantization.folding import Adjustments, realise
from pipeline.quantization.int4_grids import ASYMMETRIC_SCALES, asymmetric, symmetric
from pipeline.quantization.linear_inputs import LinearInputs
from pipeline.quantization.methods import CHOOSERS
from pipeline.quantization.moments import Factors
from pipeline.quantization.problem import PLAIN, Choice, Loss, Problem, Treatment
from pipeline.quantization.scale_groups import scale_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.progress import Progress
    from pipeline.quantization.capture import Captured, Inputs
    from pipeline.quantization.rules import Linear
    from pipeline.quantization.scale_groups import ScaleGroup


NEAREST = "rtn"  # in whatever format


def group_linears(
    architecture: Architecture, layer: int | None, present: Collection[str], linears: Mapping[str, Linear]
) -> list[tuple[str, ScaleGroup]]:
    """The scale groups of a layer's linears to quantize, each with its method: linears of two methods share no scale.
    `layer` None: of what surrounds the layers.

    `present`: full names of the layer's linears, without ".weight".
    """
    by_method: dict[str, list[str]] = {}
    for name, linear in linears.items():
        by_method.setdefault(linear.method, []).append(name)
    return [
        (method, group)
        for method, names in by_method.items()
        for group in scale_groups(architecture, layer, present, set(names))
    ]


@dataclass(slots=True)
class LayerPlan:
    """What `write` needs: the scales, the treatments by linear, and what the report says of each linear.

    `losses`: some methods know theirs only once the linear is written.
    """

    adjustments: Adjustments
    treatments: dict[str, Treatment] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: dict[str, Mapping[str, Loss]] = field(default_factory=dict)
    experts: dict[str, Any] | None = None
    coverage: dict[str, dict[str, float]] = field(default_factory=dict)  # by input
    added: dict[str, Tensor] = field(default_factory=dict)  # tensors that the source has not, by name

    def describe(self, name: str) -> dict[str, Any]:
        """A written linear's row of the report."""
        loss = self.losses[name].get(name)
        return {
            **self.rows[name],
            "loss_before": _round(loss.before) if loss else None,
            "loss_after": _round(loss.after) if loss else None,
        }


def plan_layer(
    layer: int | None,
    groups: Sequence[tuple[str, ScaleGroup]],
    linears: Mapping[str, Linear],
    source: TensorSource,
    captured: Captured | None,
    *,
    dtype: torch.dtype,
    clip: bool,
    unrouted: str,
    progress: Progress,
) -> LayerPlan:
    """Asks the methods about their groups, as of `group_linears`. `captured` is None where none measures anything.

    Raises QuantizationError for experts without tokens where `unrouted` is "error".
    """
    plan = LayerPlan(Adjustments(dtype))
    read, factors = partial(read_float, source), Factors()
    seen = LinearInputs(captured, read, unrouted) if captured is not None else None
    if seen is not None and layer is not None:
        plan.experts = seen.report_experts(layer)
    for method, group in groups:
        looks = seen if METHODS[method].measures else None
        members = tuple(linears[name] for name in group.linears)
        inputs = looks.sampled(group, members) if looks is not None else {}
        has_zeros = FORMATS[METHODS[method].format].zeros
        problem = Problem(
            name=group.name,
            linears=members,
            read=read,
            mean_abs=_statistic("mean_abs", group, captured, inputs),
            max_abs=_statistic("max_abs", group, captured, inputs),
            inputs=inputs,
            realise=_refuse_vector
            if has_zeros and group.fold is None
            else partial(realise, fold=group.fold, source=source, dtype=dtype),
            scale_dtype=ASYMMETRIC_SCALES if has_zeros else dtype,
            clip=clip,
            grid=asymmetric if has_zeros else symmetric,
            moments=looks.moments(group, members) if looks is not None and METHODS[method].moments else {},
            factors=factors,
        )
        unfed = {linear.name for linear in members if looks is not None and linear.name not in inputs}
        _take(plan, group, CHOOSERS[method](problem), linears, source, unfed)
        progress.advance(1)
    _share_input_ranges(plan, {name: linears[name] for _, group in groups for name in group.linears})
    return plan


def _refuse_vector(scale: Tensor) -> None:
    """For formats without: no scale but one that folds."""


def _share_input_ranges(plan: LayerPlan, linears: Mapping[str, Linear]) -> None:
    """One static range for the input of a projection of all experts of a layer, the largest of theirs: they become one
    stack, whose product quantizes its input once."""
    shared: dict[str, float] = {}
    experts = {
        name: name.rpartition(".")[2]
        for name, linear in linears.items()
        if linear.expert is not None and FORMATS[linear.format].static_inputs
    }
    for name, projection in experts.items():
        amax = plan.treatments.get(name, PLAIN).input_amax
        if amax is not None:
            shared[projection] = max(amax, shared.get(projection, 0.0))
    for name, projection in experts.items():
        if projection in shared:
            plan.treatments[name] = replace(plan.treatments.get(name, PLAIN), input_amax=shared[projection])


def _take(
    plan: LayerPlan,
    group: ScaleGroup,
    choice: Choice,
    linears: Mapping[str, Linear],
    source: TensorSource,
    unfed: Collection[str],
) -> None:
    """`unfed`: linears of a method that measures, of which calibration saw too little to measure."""
    place = plan.adjustments.add(group, choice.scale, source) if choice.scale is not None else None
    plan.treatments.update(choice.treatments)
    for name in group.linears:
        plan.losses[name] = choice.losses
        treatment, linear = choice.treatments.get(name, PLAIN), linears[name]
        vector = plan.adjustments.dtype.itemsize * linear.shape[1] if name in plan.adjustments.vectors else 0
        plan.rows[name] = {
            "method": _name_unfed(linear.method, choice) if name in unfed else linear.method,
            "format": linear.format,
            "group_size": linear.group,
            "weights": linear.shape[0] * linear.shape[1],
            "bytes": FORMATS[linear.format].nbytes(linear.shape, linear.group) + vector,
            "alpha": choice.alpha,
            "scale": place,
            "scale_group": group.name,
            "clipped": treatment.limits is not None,
        }


def _name_unfed(method: str, choice: Choice) -> str:
    """What was done to a linear that its method measured nothing of: it took its group's scale, if there is one, and
    was rounded to nearest."""
    if choice.scale is None:
        return NEAREST
    return METHODS[method].scale_only or method


def _round(loss: float) -> float:
    """Four digits: the last bits of a sum depend on the number of threads, and equal runs are to give equal bytes."""
    return float(f"{loss:.4g}")


def _statistic(which: str, group: ScaleGroup, captured: Captured | None, inputs: Mapping[str, Inputs]) -> Tensor | None:
    if captured is None or not inputs:
        return None
    if group.expert is None:  # all tokens of the layer, whoever reads them
        return cast("Tensor", getattr(captured.inputs[group.seen_at], which))
    return cast("Tensor", getattr(next(iter(inputs.values())), which))


def read_float(source: TensorSource, name: str) -> Tensor:
    """The weight [O, I] of a linear, in float32."""
    return read_weight(source, f"{name}.weight").float()
