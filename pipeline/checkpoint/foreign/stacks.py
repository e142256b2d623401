"""Experts of one layer are one stack in the engine, in one format: what one of them cannot be, none is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping as AbstractMapping
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.holding import Held

if TYPE_CHECKING:
    from pipeline.checkpoint.foreign.linear import ForeignLinear
    from pipeline.checkpoint.layouts import Mapping


def level_stacks(
    mappings: Sequence[Mapping], found: dict[str, Held | str], linears: AbstractMapping[str, ForeignLinear]
) -> None:
    """Changes in `found`, by target, what would not make one stack. `linears` by the name of the source's weight."""
    stacks: dict[tuple[int | None, str], list[Mapping]] = defaultdict(list)
    for mapping in mappings:
        if mapping.expert is not None and mapping.target in found:
            stacks[mapping.layer, mapping.target.rpartition(f".{mapping.expert}.")[2]].append(mapping)
    for stack in stacks.values():
        answers = [found[mapping.target] for mapping in stack]
        reason = next((each for each in answers if isinstance(each, str)), None)
        kinds = {(each.format, each.group, each.prescaled) for each in answers if isinstance(each, Held)}
        if reason is not None:
            _set(stack, found, f"is one of a stack of which one {reason}", keep=True)
        elif len(kinds) > 1:
            _set(stack, found, "is one of a stack of several formats")
        elif len({_input_scale(linears[mapping.sources[0]]) for mapping in stack}) > 1:
            can_widen = all(isinstance(each, Held) and each.format in ("fp8", "fp8_rows") for each in answers)
            wide = Held(format="fp8_rows") if can_widen else "is one of a stack that rounds its input differently"
            _set(stack, found, wide)


def _input_scale(linear: ForeignLinear) -> float | None:
    return float(linear.input_scale()) if linear.input_scale is not None else None


def _set(stack: Sequence[Mapping], found: dict[str, Held | str], answer: Held | str, *, keep: bool = False) -> None:
    for mapping in stack:
        if not (keep and isinstance(found[mapping.target], str)):
            found[mapping.target] = answer
