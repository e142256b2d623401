"""Which of our formats holds a foreign linear, to the last number. Its tensors in it: parts.py.

An engine's linear may be several of the source's (q, k and v), one below the other: then all of them must be of one
format, and what belongs to their one input must be the same in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.linear import STATIC, ForeignLinear
from pipeline.checkpoint.layouts.scales import BLOCK
from pipeline.checkpoint.tensors import DTYPES

if TYPE_CHECKING:
    import torch

# Of INT4, as TensorRT dequantizes it inside a GEMM; a larger group is several of them with one scale.
GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`format` is a key of quantization.catalog.FORMATS; `group` inputs per scale of INT4; `rounds`: its input is
    rounded too. input: a digest of what its input is multiplied by and rounded in; "" for neither. per_output: of FP8,
    its scales differ within one of the source's linears. rounded: the largest relative change that the model's type
    makes to float32 INT4 scales."""

    format: str
    group: int | None = None
    rounds: bool = False
    prescaled: bool = False
    input: str = ""
    per_output: bool = False
    rounded: float = 0.0

    @property
    def kind(self) -> Held:
        """What it has in common with others that take as much."""
        return Held(format=self.format, group=self.group, rounds=self.rounds, prescaled=self.prescaled)


# Of linears that were quantized, by the engine's names: what holds each, or why nothing does.
Holding = Mapping[str, Held | str]
WAY_OUT = (
    "stages.convert.foreign: dequantize carries those in 16 bits, by name in conversion.json; or, for float16 scales "
    "in a bfloat16 model, set stages.convert.dtype: float16"
)


def tell_widened(holding: Holding) -> str | None:
    """How many no format of ours holds, the first of them and why; None where there are none."""
    reasons = {name: each for name, each in holding.items() if isinstance(each, str)}
    if not reasons:
        return None
    name, reason = next(iter(reasons.items()))
    return (
        f"{len(reasons)} of {len(holding)} linears that another tool quantized are held by no format of the engine's: "
        f"{name.removesuffix('.weight')} {reason}"
    )


def hold(linears: Sequence[ForeignLinear], dtype: str) -> Held | str:
    """How one linear of the engine, made of these, is held in a model of type `dtype` ("F16", …); or why it cannot be.
    Reads scales, zero points and orders, not the weights."""
    first = linears[0]
    if any((each.kind, each.inputs) != (first.kind, first.inputs) for each in linears):
        return f"{_join(linears)} become one linear, and are of different formats"
    if any(each.has_offset() for each in linears):
        return "has zero points; the engine's INT4 and INT8 are symmetric"
    if not all(each.is_in_order() for each in linears):
        return "has its groups scattered over the inputs (act-order); an engine's lie side by side"
    if (reason := _find_split_input(linears, dtype)) is not None:
        return reason
    held = HOLD[first.kind](linears, dtype)
    return held if isinstance(held, str) else replace(held, input=_digest_input(first, held))


def _digest_input(linear: ForeignLinear, held: Held) -> str:
    reads = (linear.prescale if held.prescaled else None, linear.input_scale if held.rounds else None)
    numbers = [read().float().numpy().tobytes() for read in reads if read is not None]
    return hashlib.blake2s(b"|".join(numbers), digest_size=8).hexdigest() if numbers else ""


def _hold_int4(linears: Sequence[ForeignLinear], dtype: str) -> Held | str:
    first = linears[0]
    if first.inputs == STATIC:
        return "has INT4 weights and inputs of 8 bits"
    if any(each.shape[0] % 2 for each in linears):
        return "has an odd number of outputs; two share a byte"
    sizes = {each.group for each in linears}
    group = next((size for size in GROUPS if all(each % size == 0 for each in sizes)), None)
    if group is None:
        return f"has groups of {', '.join(map(str, sorted(sizes)))}; the engine's are of {', '.join(map(str, GROUPS))}"
    rounded = 0.0
    for each in linears:
        scales = each.scales()
        change = float(((round_to(scales, dtype) - scales).abs() / scales.abs().clamp_min(1e-38)).max())
        if not change < 2**-7:  # NaN too
            return f"has scales that {DTYPES[dtype][1]} cannot hold"
        if change and each.scale_type != "F32":
            return f"has {DTYPES[each.scale_type][1]} scales that are none of {DTYPES[dtype][1]}, the model's type"
        rounded = max(rounded, change)
    return Held(format="int4", group=group, prescaled=first.prescale is not None, rounded=rounded)


def _hold_int8(linears: Sequence[ForeignLinear], dtype: str) -> Held | str:
    first = linears[0]
    if any(each.grid[1] > 1 for each in linears):
        return "has INT8 scales for groups of inputs; the engine's are for each output"
    if first.inputs == STATIC:
        return Held(format="int8_sq", rounds=True, prescaled=first.prescale is not None)
    if first.prescale is not None:
        return "has INT8 weights alone, and a scale of its inputs"
    return Held(format="int8")


def _hold_fp8(linears: Sequence[ForeignLinear], dtype: str) -> Held | str:
    import torch

    first = linears[0]
    if first.prescale is not None:
        return "has FP8 weights, and a scale of its inputs"
    if any(each.is_blocked != first.is_blocked for each in linears):
        return f"{_join(linears)} become one linear, and only some have FP8 scales of blocks"
    if first.is_blocked:
        if any(each.shape[0] % BLOCK for each in linears[:-1]):
            return f"{_join(linears)} become one linear, and their rows are no multiples of {BLOCK}, FP8's blocks"
        return Held(format="fp8_blocks")
    if any(each.grid[1] > 1 for each in linears):
        return "has FP8 scales for groups of inputs"
    scales = [each.scales().reshape(-1) for each in linears]
    rounds, is_one = first.inputs == STATIC, all(torch.equal(each, scales[0][:1].expand(len(each))) for each in scales)
    per_output = any(bool((each != each[0]).any()) for each in scales)
    return Held(format="fp8" if rounds and is_one else "fp8_rows", rounds=rounds, per_output=per_output)


HOLD: dict[str, Callable[[Sequence[ForeignLinear], str], Held | str]] = {
    "int4": _hold_int4,
    "int8": _hold_int8,
    "fp8": _hold_fp8,
}


def _find_split_input(linears: Sequence[ForeignLinear], dtype: str) -> str | None:
    """What keeps linears that read one input from being one."""
    import torch

    vectors = [each.prescale().float() for each in linears if each.prescale is not None]
    if len(vectors) not in (0, len(linears)) or any(not torch.equal(each, vectors[0]) for each in vectors):
        return f"{_join(linears)} become one linear, and scale its input differently"
    if vectors and not torch.equal(round_to(vectors[0], dtype), vectors[0]):
        return f"scales its input by numbers that are none of {DTYPES[dtype][1]}, the model's type"
    steps = {float(each.input_scale()) for each in linears if each.input_scale is not None}
    if len(steps) > 1:
        return f"{_join(linears)} become one linear, and round its input differently"
    return None


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    import torch

    return values.to(getattr(torch, DTYPES[dtype][1]))


def round_to(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return cast(values, dtype).float()


def _join(linears: Sequence[ForeignLinear]) -> str:
    return " and ".join(each.name.rpartition(".")[2] for each in linears)
