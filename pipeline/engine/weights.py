"""What the weights of an engine take, from the layout (which tensors there are) and the quantization rules.

By kinds of tensors: DeepSeek-V3's 90,000 cost no more than a small model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import list_kinds
from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks
from pipeline.engine.kernels import DTYPE_BYTES
from pipeline.engine.split import WHOLE, Split

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind

GROUP_SIZES = (128, 64, 32)
_FLOAT32 = 4
# Roles of the linears that DeepSeek ships in FP8 blocks.
FP8_ROLES = ("experts", "shared_experts", "mlp", "attention_output", "attention_input", "attention_latent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Rules:
    """Which linears become INT4: roles to include, shell patterns of engine names to leave out, the group wanted."""

    include: Sequence[str]
    exclude: Sequence[str] = ()
    group_size: int = 128

    def pick_group(self, role: str, shape: tuple[int, ...]) -> int | None:
        """The group of a linear [out, in], None where it stays 16-bit."""
        if role not in self.include or len(shape) != 2 or shape[0] % 2:
            return None
        return next((size for size in GROUP_SIZES if size <= self.group_size and shape[1] % size == 0), None)


def estimate_weights(
    architecture: Architecture,
    *,
    dtype: str,
    max_seq_len: int,
    int4: Int4Rules | None = None,
    fp8: bool = False,
    split: Split = WHOLE,
    layers: range | None = None,
) -> int:
    """Bytes of weights that the engine file will state, RoPE's tables among them; of a split model, on the GPU with
    these layers."""
    e = DTYPE_BYTES[dtype]
    layers = layers if layers is not None else range(architecture.num_layers)
    total = 0
    for kind in list_kinds(architecture):
        mapping, count, share = kind.first, split.count(kind, architecture, layers), split.share(kind)
        if mapping.optional or not count:
            continue
        if fp8 and mapping.role in FP8_ROLES and len(mapping.target_shape) == 2:
            blocks = math.prod(count_blocks(mapping.target_shape))
            total += count * blocks * (BLOCK * BLOCK + _FLOAT32) // share  # the last ones are filled up
            continue
        elements, quantized = math.prod(mapping.target_shape), 0
        group = int4.pick_group(mapping.role, mapping.target_shape) if int4 else None
        if int4 and group:
            # Of a split model's experts, as many on each GPU.
            quantized = count - _count_excluded(kind, int4.exclude) * count // kind.count
            total += quantized * (elements // 2 + elements // group * e) // share
        # Routers run in float32, and their constants are widened when the engine is built.
        total += (count - quantized) * elements * (_FLOAT32 if mapping.role == "router" else e) // share
    rotary = architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim
    return total + max_seq_len * rotary * _FLOAT32


def _count_excluded(kind: Kind, patterns: Sequence[str]) -> int:
    """How many of the tensors of a kind a pattern names, with or without `.weight`."""
    if not patterns:
        return 0
    # One expression for all patterns: DeepSeek-V3 has 45,000 expert linears to hold against them.
    excludes = re.compile("|".join(map(translate, patterns))).match
    return sum(1 for name in kind.names() if excludes(name.removesuffix(".weight")) or excludes(name))
