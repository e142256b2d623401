"""Small experts in every storage."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.expert_inputs import draw_experts
from plugins.moe_experts.operation import MoeExperts

BASE = MoeExperts(
    dtype="float32",
    hidden=64,
    width=32,
    experts=6,
    first=0,
    count=6,
    top_k=2,
    up_storage="plain",
    up_group=0,
    up_step=0.0,
    down_storage="plain",
    down_group=0,
    down_step=0.0,
    prescale="",
)
# Attributes of each storage, of both products.
STORAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"up_storage": "fp8", "up_step": 0.01, "down_storage": "fp8", "down_step": 0.02},
    "fp8_blocks": {"up_storage": "fp8_blocks", "down_storage": "fp8_blocks"},
    "int4": {"up_storage": "int4", "up_group": 32, "down_storage": "int4", "down_group": 32},
}


def make_inputs(op: MoeExperts, rows: int, chosen: torch.Tensor | None = None, seed: int = 0) -> list[torch.Tensor]:
    return draw_experts(op, rows, "cpu", chosen, seed)
