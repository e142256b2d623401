"""One decoder layer: its scale groups put to the method as problems, the answers gathered for writing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.checkpoint.block_scales import read_weight
from pipeline.errors import QuantizationError
from pipeline.quantization.capture import EXPERTS, Captured, Inputs
from pipeline.quantization.folding import Adjustments, realise
from pipeline.quantization.methods import CHOOSERS
from pipeline.quantization.problem import PLAIN, Choice, Problem, Treatment
from pipeline.quantization.scale_groups import scale_groups
from pipeline.quantization.selection import FORMATS, METHODS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.progress import Progress
    from pipeline.quantization.rules import Linear
    from pipeline.quantization.scale_groups import ScaleGroup

# An expert with fewer calibration tokens has no statistics of its own: fewer than a handful of values per channel.
FEW_TOKENS = 32
UNROUTED = ("round_to_nearest", "share_scale", "error")  # see settings.py


def group_linears(
    architecture: Architecture, layer: int, present: Collection[str], linears: Mapping[str, Linear]
) -> list[tuple[str, ScaleGroup]]:
    """The scale groups of a layer's linears to quantize, each with its method: linears of two methods share no scale.

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
    """What `write` needs: the scales, the treatments by linear, and the report's rows by linear."""

    adjustments: Adjustments
    treatments: dict[str, Treatment] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    experts: dict[str, Any] | None = None
    added: dict[str, Tensor] = field(default_factory=dict)  # tensors that the source has not, by name


def plan_layer(
    layer: int,
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
    """Asks the methods about their groups. `captured` is None where none measures anything.

    Raises QuantizationError for experts without tokens where `unrouted` is "error".
    """
    plan = LayerPlan(Adjustments(dtype))
    starved = _find_starved(captured)
    if captured is not None and captured.experts:
        plan.experts = _report_experts(layer, captured, starved, unrouted)
    for method, group in groups:
        looks = captured if METHODS[method].measures else None
        inputs = _inputs_of(group, linears, source, looks, starved, unrouted) if looks is not None else {}
        problem = Problem(
            name=group.name,
            linears=tuple(linears[name] for name in group.linears),
            read=partial(_read_weight, source),
            mean_abs=_statistic("mean_abs", group, looks, inputs),
            max_abs=_statistic("max_abs", group, looks, inputs),
            inputs=inputs,
            realise=partial(realise, fold=group.fold, source=source, dtype=dtype),
            scale_dtype=dtype,
            clip=clip and group.clip,
        )
        _take(plan, group, CHOOSERS[method](problem), linears, source)
        progress.advance(1)
    _share_input_ranges(plan, linears)
    return plan


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
    plan: LayerPlan, group: ScaleGroup, choice: Choice, linears: Mapping[str, Linear], source: TensorSource
) -> None:
    place = plan.adjustments.add(group, choice.scale, source) if choice.scale is not None else None
    plan.treatments.update(choice.treatments)
    for name in group.linears:
        loss = choice.losses.get(name)
        treatment = choice.treatments.get(name, PLAIN)
        plan.rows[name] = {
            "method": linears[name].method,
            "format": linears[name].format,
            "group_size": linears[name].group,
            "alpha": choice.alpha,
            "scale": place,
            "clipped": treatment.limits is not None,
            "loss_before": _round(loss.before) if loss else None,
            "loss_after": _round(loss.after) if loss else None,
        }


def _round(loss: float) -> float:
    """Four digits: the last bits of a sum depend on the number of threads, and equal runs are to give equal bytes."""
    return float(f"{loss:.4g}")


def _find_starved(captured: Captured | None) -> list[int]:
    experts = captured.experts if captured is not None else ()
    return [expert for expert, inputs in enumerate(experts) if inputs.tokens < FEW_TOKENS]


def _report_experts(layer: int, captured: Captured, starved: list[int], unrouted: str) -> dict[str, Any]:
    tokens = [inputs.tokens for inputs in captured.experts]
    if starved and unrouted == "error":
        few = ", ".join(f"{expert} ({tokens[expert]} tokens)" for expert in starved)
        raise QuantizationError(
            f"layer {layer}: calibration sent fewer than {FEW_TOKENS} tokens to {len(starved)} of {len(tokens)} "
            f"experts: {few}",
            hint="add text or samples to stages.quantize.calibration, or choose another unrouted_experts policy",
        )
    return {"tokens": tokens, "unrouted": {str(expert): unrouted for expert in starved}}


def _inputs_of(
    group: ScaleGroup,
    linears: Mapping[str, Linear],
    source: TensorSource,
    captured: Captured,
    starved: list[int],
    unrouted: str,
) -> dict[str, Inputs]:
    """Each linear's own input. A starved expert has none, or with "share_scale" what the whole layer was fed."""
    if group.seen_at != EXPERTS or not captured.experts:
        return dict.fromkeys(group.linears, captured.inputs[group.seen_at])
    found = {}
    for name in group.linears:
        expert = linears[name].expert
        if expert is None:
            raise ValueError(f"{name} reads the experts' input and belongs to no expert")
        if expert not in starved:
            inputs = captured.experts[expert]
        elif unrouted == "share_scale":
            inputs = captured.inputs[EXPERTS]
        else:
            continue
        found[name] = inputs if group.expert is None else _gate(name, inputs, source)
    return found


def _gate(projection: str, inputs: Inputs, source: TensorSource) -> Inputs:
    """The input of an expert's proj, from the sampled rows of the expert's: SiLU(x·fcᵀ) ⊙ (x·gateᵀ).

    Computed here since transformers keeps all experts in one module, without a place to look into.
    """
    expert = projection.removesuffix(".proj")
    x = inputs.rows
    hidden = torch.nn.functional.silu(x @ _read_weight(source, f"{expert}.fc").T)
    hidden *= x @ _read_weight(source, f"{expert}.gate").T
    mean, peaks = (found.bfloat16().float() for found in (hidden.abs().mean(0), hidden.abs().amax(0)))
    return Inputs(mean, peaks, hidden, inputs.tokens)


def _statistic(which: str, group: ScaleGroup, captured: Captured | None, inputs: Mapping[str, Inputs]) -> Tensor | None:
    if captured is None or not inputs:
        return None
    if group.expert is None:  # all tokens of the layer, whoever reads them
        return cast("Tensor", getattr(captured.inputs[group.seen_at], which))
    return cast("Tensor", getattr(next(iter(inputs.values())), which))


def _read_weight(source: TensorSource, name: str) -> Tensor:
    return read_weight(source, f"{name}.weight").float()
