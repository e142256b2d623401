"""What each linear of a layer reads, as far as calibration saw it: its own input, or of an expert what it was sent.

A starved expert, one with too few tokens, is fed by the policy `unrouted`: nothing, or what the whole layer was.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import QuantizationError
from pipeline.quantization.capture import EXPERTS, Captured, Inputs
from pipeline.quantization.moments import Moment, MomentSum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from pipeline.quantization.rules import Linear
    from pipeline.quantization.scale_groups import ScaleGroup

# An expert with fewer calibration tokens has no statistics of its own: fewer than a handful of values per channel.
FEW_TOKENS = 32
UNROUTED = ("round_to_nearest", "share_scale", "error")  # see settings.py
DONE = {"round_to_nearest": "rounded to nearest", "share_scale": "measured on the tokens of the whole layer"}


def warn_starved(experts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What to tell the user of a run's starved experts, by quantization.json's "experts"; None where all were fed."""
    starved = {layer: row for layer, row in experts.items() if row["unrouted"]}
    if not starved:
        return None
    layer, first = max(starved.items(), key=lambda item: len(item[1]["unrouted"]))
    where = f"layer {layer}: {len(first['unrouted'])} of {len(first['tokens'])} experts"
    if len(starved) > 1:
        count, of = (sum(len(row[key]) for row in experts.values()) for key in ("unrouted", "tokens"))
        where = f"{count} of {of} experts in {len(starved)} of {len(experts)} layers (most in {where})"
    policies = sorted({policy for row in starved.values() for policy in row["unrouted"].values()})
    return (
        f"{where} had fewer than {FEW_TOKENS} tokens of calibration: {', '.join(DONE[policy] for policy in policies)} "
        "(stages.quantize.unrouted_experts); more stages.quantize.calibration.samples would feed them"
    )


class LinearInputs:
    """`read(name)` gives a weight of the layer [O, I] as float32."""

    def __init__(self, captured: Captured, read: Callable[[str], Tensor], unrouted: str) -> None:
        self.captured, self.read, self.unrouted = captured, read, unrouted
        self.starved = [expert for expert, inputs in enumerate(captured.experts) if inputs.tokens < FEW_TOKENS]

    def report_experts(self, layer: int) -> dict[str, Any] | None:
        """Tokens by expert and the policy for each starved one. Raises QuantizationError where that is "error"."""
        tokens = [inputs.tokens for inputs in self.captured.experts]
        if not tokens:
            return None
        if self.starved and self.unrouted == "error":
            few = ", ".join(f"{expert} ({tokens[expert]} tokens)" for expert in self.starved)
            raise QuantizationError(
                f"layer {layer}: calibration sent fewer than {FEW_TOKENS} tokens to {len(self.starved)} of "
                f"{len(tokens)} experts: {few}",
                hint="add text or samples to stages.quantize.calibration, or choose another unrouted_experts policy",
            )
        return {"tokens": tokens, "unrouted": {str(expert): self.unrouted for expert in self.starved}}

    def sampled(self, group: ScaleGroup, linears: Sequence[Linear]) -> dict[str, Inputs]:
        """Means and sampled rows of each linear of `group` that was fed."""
        if not self._is_routed(group):
            return dict.fromkeys(group.linears, self.captured.inputs[group.seen_at])
        found = {}
        for linear, expert in self._fed(linears):
            inputs = self.captured.inputs[EXPERTS] if expert is None else self.captured.experts[expert]
            found[linear.name] = inputs if group.expert is None else self._gate_sample(linear.name, inputs)
        return found

    def moments(self, group: ScaleGroup, linears: Sequence[Linear]) -> dict[str, Moment]:
        """The second moments of each, not made yet."""
        if not self._is_routed(group):
            shared = Moment(group.seen_at, partial(self.captured.moments.__getitem__, group.seen_at))
            return dict.fromkeys(group.linears, shared)
        found = {}
        for linear, expert in self._fed(linears):
            projection = None if group.expert is None else linear.name
            key = f"{EXPERTS} {'*' if expert is None else expert} {projection or ''}"
            found[linear.name] = Moment(key, partial(self._expert_moment, expert, projection))
        return found

    def _is_routed(self, group: ScaleGroup) -> bool:
        return group.seen_at == EXPERTS and bool(self.captured.experts)

    def _fed(self, linears: Sequence[Linear]) -> Iterator[tuple[Linear, int | None]]:
        """The experts' linears that are fed, with whose tokens: an expert's, or all (None)."""
        for linear in linears:
            if linear.expert is None:
                raise ValueError(f"{linear.name} reads the experts' input and belongs to no expert")
            if linear.expert not in self.starved:
                yield linear, linear.expert
            elif self.unrouted == "share_scale":
                yield linear, None

    def _expert_moment(self, expert: int | None, projection: str | None) -> Tensor:
        spilled = self.captured.expert_inputs
        if spilled is None:
            raise ValueError("the experts' input was not kept")
        total = MomentSum()
        for rows in spilled.rows(expert):
            total.add(rows if projection is None else self._gate(projection, rows))
        return total.finish()

    def _gate_sample(self, projection: str, inputs: Inputs) -> Inputs:
        hidden = self._gate(projection, inputs.rows)
        mean, peaks = (found.bfloat16().float() for found in (hidden.abs().mean(0), hidden.abs().amax(0)))
        return Inputs(mean, peaks, hidden, inputs.tokens)

    def _gate(self, projection: str, x: Tensor) -> Tensor:
        """The input of an expert's proj, from rows of the expert's: SiLU(x·fcᵀ) ⊙ (x·gateᵀ).

        Computed here since transformers keeps all experts in one module, without a place to look into.
        """
        expert = projection.removesuffix(".proj")
        hidden = torch.nn.functional.silu(x @ self.read(f"{expert}.fc").T)
        return hidden.mul_(x @ self.read(f"{expert}.gate").T)
