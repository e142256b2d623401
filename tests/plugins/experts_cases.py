"""Inputs of moe_experts: random weights in every storage, and rows that choose."""

from __future__ import annotations

from typing import Any

import torch

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


def draw_chosen(rows: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Each row's experts, no one twice."""
    ranked = torch.rand(rows, experts, generator=generator).argsort(1)
    return ranked[:, :top_k].to(torch.int32)


def make_inputs(op: MoeExperts, rows: int, chosen: torch.Tensor | None = None, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name, dtype, (first, *rest) in op.described_inputs():
        shape = (rows if name in ("x", "weights", "indices") else first, *rest)
        wide = torch.randn(shape, generator=generator)
        if name == "indices":
            made.append(chosen if chosen is not None else draw_chosen(rows, op.experts, op.top_k, generator))
        elif name.endswith("_scales"):
            least = 0.01 if _storage(op, name) == "int4" else 0.002
            made.append((least * (1 + 2 * torch.rand(shape, generator=generator))).to(getattr(torch, dtype)))
        elif dtype == "int8" and _storage(op, name) == "int4":
            made.append(torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8))
        elif dtype == "int8":
            made.append((wide * 20).to(torch.float8_e4m3fn).view(torch.int8))
        else:
            factor = 1.0 if name in ("x", "weights") else shape[-1] ** -0.5
            made.append((wide * factor).to(getattr(torch, dtype)))
    return made


def _storage(op: MoeExperts, name: str) -> str:
    return op.down_storage if name.startswith("proj") else op.up_storage
