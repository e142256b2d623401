"""What the weights of an engine take, from the layout (which tensors there are) and the quantization rules.

By kinds of tensors: DeepSeek-V3's 90,000 cost no more than a small model's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import list_kinds
from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.split import count_held, count_sharers
from pipeline.quantization.selection import FORMATS, FP8_BLOCKS, METHODS, NOTHING, Decision, Rules
from pipeline.sharding.ranks import Rank
from pipeline.sharding.spreading import Spreading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind

_FLOAT32 = 4
# Roles of the linears that DeepSeek ships in FP8 blocks.
FP8_ROLES = ("experts", "shared_experts", "mlp", "attention_output", "attention_input", "attention_latent")


def list_block_roles(architecture: Architecture, rules: Rules, *, fp8: bool) -> frozenset[str]:
    """Roles of the linears that an engine has in FP8 blocks, some of a role at least: all that the source has so, where
    they are kept (fp8), or what the rules make."""
    if fp8:
        return frozenset(FP8_ROLES)
    if not any(METHODS[method].format == FP8_BLOCKS for method in rules.methods):
        return frozenset()
    decisions = ((kind.first.role, decision) for kind in list_kinds(architecture) for decision in _decide(rules, kind))
    return frozenset(role for role, found in decisions if isinstance(found, Decision) and found.format == FP8_BLOCKS)


def estimate_weights(
    architecture: Architecture,
    *,
    dtype: str,
    max_seq_len: int,
    rules: Rules = NOTHING,
    fp8: bool = False,
    rank: Rank = Rank(),
) -> int:
    """Bytes of weights that the engine file will state, RoPE's tables among them, of one rank."""
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
        for decision, chosen in _decide(rules, kind).items():
            nbytes = plain
            if isinstance(decision, Decision):
                nbytes = FORMATS[decision.format].engine_nbytes(mapping.target_shape, decision.group, e)
            # Of a split model's experts, as many of each on each GPU.
            total += chosen * count // kind.count * nbytes // share
    rotary = architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim
    return total + max_seq_len * rotary * _FLOAT32


def _decide(rules: Rules, kind: Kind) -> Mapping[Decision | str, int]:
    """What becomes of a kind's tensors, and of how many."""
    return rules.count(kind) if len(kind.first.target_shape) == 2 else {"": kind.count}
