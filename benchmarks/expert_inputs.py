"""Inputs of moe_experts, drawn at random in every storage, and the least that they cost."""

from __future__ import annotations

import torch

from plugins.moe_experts.operation import MoeExperts
from plugins.moe_experts.products import INT4

OF_ROWS = ("x", "weights", "indices")


def draw_chosen(rows: int, op: MoeExperts, generator: torch.Generator) -> torch.Tensor:
    """Each row's experts, of all there are, none twice; drawn evenly."""
    scores = torch.rand((rows, op.experts), generator=generator, device=generator.device)
    return scores.topk(op.top_k, 1).indices.to(torch.int32)


def draw_experts(
    op: MoeExperts, rows: int, device: str, chosen: torch.Tensor | None = None, seed: int = 1
) -> list[torch.Tensor]:
    """Inputs of a step of so many rows. Scales are such that outputs are of about 1."""
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for name, dtype, (first, *rest) in op.described_inputs():
        shape = (rows if name in OF_ROWS else first, *rest)
        storage = op.down_storage if name.startswith("proj") else op.up_storage
        if name == "indices":
            made.append(draw_chosen(rows, op, generator) if chosen is None else chosen)
        elif name == "prescale":
            made.append((0.5 + torch.rand(shape, generator=generator, device=device)).to(getattr(torch, dtype)))
        elif name.endswith("_scales"):
            # INT4 values are about 5, those of FP8 about 20.
            width = op.width if name.startswith("proj") else op.hidden
            least = (0.1 if storage == INT4 else 0.025) * width**-0.5
            drawn = least * (1 + 2 * torch.rand(shape, generator=generator, device=device))
            made.append(drawn.to(getattr(torch, dtype)))
        elif dtype == "int8" and storage == INT4:
            made.append(torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8))
        else:
            wide = torch.randn(shape, generator=generator, device=device)
            if dtype == "int8":
                made.append((20 * wide).to(torch.float8_e4m3fn).view(torch.int8))
            else:
                made.append((wide * (1.0 if name in OF_ROWS else shape[-1] ** -0.5)).to(getattr(torch, dtype)))
    return made


def count_bytes(op: MoeExperts, inputs: list[torch.Tensor]) -> int:
    """Of the experts that rows chose, everything once; of rows, what goes in and comes out."""
    x, _, indices, *weights = inputs
    used = len({*indices.flatten().tolist()} & {*range(op.first, op.first + op.count)})
    of_rows = sum(tensor.numel() * tensor.element_size() for tensor in inputs[:3]) + 4 * len(x) * op.hidden
    return of_rows + sum(used * tensor.numel() * tensor.element_size() // len(tensor) for tensor in weights)


def count_operations(op: MoeExperts, inputs: list[torch.Tensor]) -> int:
    """Multiplications and additions of all pairs."""
    indices = inputs[2]
    pairs = int(((indices >= op.first) & (indices < op.first + op.count)).sum())
    return 2 * pairs * 3 * op.hidden * op.width
