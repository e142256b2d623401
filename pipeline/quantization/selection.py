"""What may become INT4, and in which groups: asked by the config's checks, the memory plan and quantization itself.

Pure Python without torch, since `validate` and `plan` start in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from pipeline.checkpoint.layouts import Kind

Role = Literal["experts", "shared_experts", "mlp", "attention_output", "attention_input"]
QUANTIZABLE: tuple[str, ...] = get_args(Role)
# Few bytes, or much harm: an error in the router sends tokens elsewhere, one in the latent is seen by every head.
# Layers for multi-token prediction ("mtp") are no part of the network.
NEVER = ("router", "norm", "embedding", "head", "attention_latent", "mtp")
GroupSize = Literal[128, 64, 32]  # those that TensorRT's INT4 dequantization fuses into a GEMM
GROUP_SIZES: tuple[int, ...] = get_args(GroupSize)
# INT4 methods -> whether they measure: look at activations, so that text has to go through the model.
METHODS = {"awq": True, "rtn": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Rules:
    """Which linears become INT4: roles to include, shell patterns of engine names to leave out, the group wanted."""

    include: Sequence[str]
    exclude: Sequence[str] = ()
    group_size: int = 128

    def pick_group(self, role: str, shape: tuple[int, ...]) -> int | None:
        """The group of a linear [out, in], None where it stays 16-bit."""
        return pick_group(shape, self.group_size) if role in self.include and len(shape) == 2 else None

    def count_chosen(self, kind: Kind) -> tuple[int, str]:
        """How many tensors of a kind of linear roles and patterns leave, whether a group divides them or not, and the
        first of them. Names are listed only where there are patterns to hold against them."""
        if kind.first.role not in self.include:
            return 0, ""
        if not self.exclude:
            return kind.count, kind.first.target
        excludes = compile_patterns(self.exclude)
        left = [name for name in kind.names() if not excludes(name)]
        return len(left), left[0] if left else ""


def pick_group(shape: tuple[int, ...], wanted: int) -> int | None:
    """The largest group size not above `wanted` that divides the input of a linear [out, in]; None where none does.

    Nor is there one for an odd number of outputs, since two outputs share a byte.
    """
    rows, columns = shape
    return None if rows % 2 else next((size for size in GROUP_SIZES if size <= wanted and columns % size == 0), None)


def compile_patterns(patterns: Sequence[str]) -> Callable[[str], object]:
    """Whether any shell pattern names a tensor `X.weight`, with or without `.weight`.

    One expression for all patterns: DeepSeek-V3 has 45,000 expert linears to hold against them.
    """
    if not patterns:
        return lambda name: None
    matches = re.compile("|".join(map(translate, patterns))).match
    return lambda name: matches(name.removesuffix(".weight")) or matches(name)
