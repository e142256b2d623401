"""Routed experts as a plugin: the operation that a layer's weights ask for, and its place in the network.

The weights are the checkpoint's own bytes, one expert after another: nothing is transposed or multiplied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts.scales import BLOCK_SCALES, FP8, INT8, PRESCALE, WEIGHT_SCALES
from pipeline.errors import CompatibilityError
from pipeline.network.derived import Constant, Derived
from pipeline.network.weights.fp8_blocks import read_blocks
from pipeline.network.weights.int4 import Linears
from pipeline.network.weights.lowering import find_stack_format
from pipeline.network.weights.prescale import read_prescale
from pipeline.network.weights.steps import read_input_step, read_stack_scales
from pipeline.sharding.sizes import local_sizes
from plugins.moe_experts.operation import MoeExperts

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.context import Context
    from pipeline.network.graph import Graph, Tensor
    from pipeline.network.spec import NetworkSpec
    from pipeline.network.weights import Weights

EXPERTS = "moe_experts"
NATIVE = f"set stages.build.lowering.{EXPERTS}: native"
# A linear's format -> how the plugin calls it.
STORAGES = {None: "plain", "fp8": "fp8", "fp8_blocks": "fp8_blocks", "int4": "int4"}


def make_experts(architecture: Architecture, spec: NetworkSpec, weights: Weights, place: str) -> MoeExperts:
    """The operation at a place of the graph, "layers.3.mlp.experts.". Raises CompatibilityError for weights that the
    plugin has no kernel for."""
    experts, sizes = architecture.experts, local_sizes(architecture, spec.rank)
    if experts is None:
        raise CompatibilityError(f"{architecture.name} has no routed experts", hint=NATIVE)
    hidden, width = architecture.hidden_size, sizes.expert_columns
    up = _list_bases(place, sizes.experts, "fc", "gate")
    down = _list_bases(place, sizes.experts, "proj")
    prescale = read_prescale(weights, down, width, True)
    up_storage, up_group, up_step = _describe(weights, up, width, hidden)
    down_storage, down_group, down_step = _describe(weights, down, hidden, width)
    return MoeExperts(
        dtype=spec.dtype,
        hidden=hidden,
        width=width,
        experts=experts.num_routed,
        first=sizes.experts.start,
        count=len(sizes.experts),
        # Without its own plugin, the exchange between ranks sends each pair by itself.
        top_k=1 if spec.rank.parallel.expert > 1 and spec.lowering.moe_all_to_all == "native" else experts.top_k,
        up_storage=up_storage,
        up_group=up_group,
        up_step=up_step,
        down_storage=down_storage,
        down_group=down_group,
        down_step=down_step,
        prescale="" if prescale is None else "shared" if prescale.shape[0] == 1 else "each",
    )


def _list_bases(place: str, experts: range, *names: str) -> list[str]:
    return [f"transformer.{place}{expert}.{name}" for name in names for expert in experts]


def _describe(weights: Weights, bases: Sequence[str], out: int, inner: int) -> tuple[str, int, float]:
    """Storage, group, step of the input."""
    stored = find_stack_format(weights, bases)
    if stored not in STORAGES:
        raise CompatibilityError(f"{bases[0]} is {stored}, for which plugin {EXPERTS} has no kernel", hint=NATIVE)
    group = Linears(weights, tuple(bases), out, inner, ()).group() if stored == "int4" else 0
    step = read_input_step(weights, bases) if stored == "fp8" else 0.0
    return STORAGES[stored], group, step


def run_expert_plugin(g: Graph, context: Context, x: Tensor, chosen: Tensor, indices: Tensor) -> Tensor:
    """As `experts.run_experts`. `g` stands at the layer's experts. Raises CompatibilityError where the experts, or fc
    and gate, have not one scale of their input's channels."""
    operation = make_experts(context.architecture, context.spec, context.weights, g.prefix)
    linears = {name: _list_bases(g.prefix, context.sizes.experts, name) for name in ("fc", "gate", "proj")}
    prescale = read_prescale(context.weights, linears["fc"] + linears["gate"], operation.hidden, True)
    if prescale is not None:
        if prescale.shape[0] > 1:
            raise CompatibilityError(
                f"{linears['fc'][0]} and others of its layer have several {PRESCALE}s, plugin {EXPERTS} takes one",
                hint=f"quantize the checkpoint again, or {NATIVE}",
            )
        x = g.product("prescaled", x, g.constant(PRESCALE, prescale, (1, operation.hidden)))
    sizes = {"fc": (operation.width, operation.hidden), "proj": (operation.hidden, operation.width)}
    read = [_read(context.weights, bases, *sizes.get(name, sizes["fc"])) for name, bases in linears.items()]
    inputs = [g.at(name).constant("weight", weight) for name, (weight, _, _) in zip(linears, read, strict=True)]
    inputs += [
        g.at(name).constant(kind, scales)
        for name, (_, kind, scales) in zip(linears, read, strict=True)
        if scales is not None
    ]
    if operation.prescale:
        inner = read_prescale(context.weights, linears["proj"], operation.width, True)
        assert inner is not None  # what `prescale` says
        inputs.append(g.at("proj").constant(PRESCALE, inner, (inner.shape[0], 1, operation.width)))
    (wide,) = g.plugin(EXPERTS, operation, [x, chosen, indices, *inputs])
    return wide


def _read(weights: Weights, bases: list[str], out: int, inner: int) -> tuple[Constant, str, Constant | None]:
    """One linear of all experts, and its scales by their name."""
    stored, names = weights.find_format(bases[0]), [f"{base}.weight" for base in bases]
    if stored == "int4":
        packed = weights.read_stack(names, (out // 2, inner), dtypes=(INT8,))
        return packed, WEIGHT_SCALES, Linears(weights, tuple(bases), out, inner, (len(bases),)).scales()
    if stored == "fp8_blocks":
        blocks = read_blocks(weights, bases, out, inner, True)
        return _as_bytes(blocks.weight), BLOCK_SCALES, blocks.scales
    if stored == "fp8":
        values = weights.read_stack(names, (out, inner), dtypes=(FP8,))
        return _as_bytes(values), WEIGHT_SCALES, read_stack_scales(weights, bases)
    return weights.read_stack(names, (out, inner)), "", None


def _as_bytes(constant: Constant) -> Constant:
    """FP8 as INT8: TensorRT knows no FP8 below SM89, where the kernel widens it by itself."""
    assert isinstance(constant, Derived)  # a stack
    return replace(constant, dtype=INT8)
