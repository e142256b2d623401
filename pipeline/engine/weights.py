"""What the weights of an engine take, from the layout (which tensors there are) and the quantization rules.

By kinds of tensors: DeepSeek-V3's 90,000 cost no more than a small model's.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.foreign.counting import HeldKinds, count_engine_bytes
from pipeline.checkpoint.foreign.holding import Held
from pipeline.checkpoint.layouts import list_kinds
from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.split import count_held, count_sharers
from pipeline.quantization.catalog import FORMATS, FP8_BLOCKS, METHODS
from pipeline.quantization.selection import NOTHING, Decision, Rules
from pipeline.sharding.ranks import Rank
from pipeline.sharding.spreading import Spreading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind

_FLOAT32 = 4
NOTHING_HELD: HeldKinds = MappingProxyType({})
Stored = Decision | Held
# Roles of the linears that DeepSeek ships in FP8 blocks.
FP8_ROLES = ("experts", "shared_experts", "mlp", "attention_output", "attention_input", "attention_latent")


def list_block_roles(
    architecture: Architecture, rules: Rules, *, fp8: bool, held: HeldKinds = NOTHING_HELD
) -> frozenset[str]:
    """Roles of the linears that an engine has in FP8 blocks, some of a role at least: all that the source has so, where
    they are kept (fp8), what the rules make, or what another tool has made (held)."""
    if fp8:
        return frozenset(FP8_ROLES)
    if not held and not any(METHODS[method].format == FP8_BLOCKS for method in rules.methods):
        return frozenset()
    found = ((kind.first.role, stored) for kind in list_kinds(architecture) for stored in _decide(rules, held, kind))
    return frozenset(role for role, stored in found if isinstance(stored, Stored) and stored.format == FP8_BLOCKS)


def estimate_weights(
    architecture: Architecture,
    *,
    dtype: str,
    max_seq_len: int,
    rules: Rules = NOTHING,
    fp8: bool = False,
    held: HeldKinds = NOTHING_HELD,
    rank: Rank = Rank(),
) -> int:
    """Bytes of weights that the engine file will state, RoPE's tables among them, of one rank. held: the linears that
    another tool has quantized, which the rules then leave alone."""
    e, spreading = MODEL_DTYPE_BYTES[dtype], Spreading(architecture)
    total = 0
    for kind in list_kinds(architecture):
        mapping, count = kind.first, count_held(kind, architecture, rank)
        if mapping.optional or not count:
            continue
        share = count_sharers(kind, spreading, rank.parallel)
        if fp8 and mapping.role in FP8_ROLES and len(mapping.target_shape) == 2:
            blocks = math.prod(count_blocks(mapping.target_shape))
            total += count * blocks * (BLOCK * BLOCK + _FLOAT32) // share  # the last ones are filled up
            continue
        # Routers run in float32, and their constants are widened when the engine is built.
        plain = math.prod(mapping.target_shape) * (_FLOAT32 if mapping.role == "router" else e)
        for stored, chosen in _decide(rules, held, kind).items():
            nbytes = plain
            if isinstance(stored, Decision):
                nbytes = FORMATS[stored.format].engine_nbytes(mapping.target_shape, stored.group, e)
            elif isinstance(stored, Held):
                nbytes = count_engine_bytes(stored, mapping.target_shape, e)
            # Of a split model's experts, as many of each on each GPU.
            total += chosen * count // kind.count * nbytes // share
    rotary = architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim
    return total + max_seq_len * rotary * _FLOAT32


def _decide(rules: Rules, held: HeldKinds, kind: Kind) -> Mapping[Any, int]:
    """What becomes of a kind's tensors, and of how many: a Decision, or Held; anything else stays plain."""
    if kind.first.target in held:
        return held[kind.first.target]
    return rules.count(kind) if len(kind.first.target_shape) == 2 else {"": kind.count}
