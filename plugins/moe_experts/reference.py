"""What the kernels compute, in plain torch: expert by expert, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.moe_experts.products import BLOCK, FP8, FP8_BLOCKS, INT4, PLAIN, Product

if TYPE_CHECKING:
    from plugins.moe_experts.operation import MoeExperts

# Rows come in multiples of this, zeros filled up, so that a row's sums are added in one order whatever other rows there
# are.
ROWS = 8
LARGEST = 448.0  # of E4M3


def apply_experts(op: MoeExperts, inputs: dict[str, Tensor]) -> Tensor:
    """[T, H] fp32. See MoeExperts."""
    x, weights, indices = inputs["x"], inputs["weights"], inputs["indices"]
    up, down = op.up(), op.down()
    pairs = x.new_zeros((*indices.shape, op.hidden), dtype=torch.float32)
    for number in sorted({*indices.flatten().tolist()} & {*range(op.first, op.first + op.count)}):
        expert = number - op.first
        rows, places = (indices == number).nonzero(as_tuple=True)
        steady = F.pad(x[rows].float(), (0, 0, 0, -len(rows) % ROWS))
        given = _round(steady, up.step)
        gate, linear = (given @ _matrix(up, inputs, name, expert).t() for name in ("fc", "gate"))
        gated = F.silu(gate) * linear
        if op.prescale:
            own = inputs["prescale"]
            gated = gated * own[expert if len(own) > 1 else 0].float()
        given = _round(gated.to(x.dtype).float(), down.step)
        made = given @ _matrix(down, inputs, "proj", expert).t()
        pairs[rows, places] = made[: len(rows)].to(x.dtype).float()
    total = x.new_zeros((len(x), op.hidden), dtype=torch.float32)
    for place in range(op.top_k):
        total += pairs[:, place] * weights[:, place, None]
    return total


def _round(x: Tensor, step: float) -> Tensor:
    """To E4M3 in steps of `step`."""
    if not step:
        return x
    return (x / step).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * step


def _matrix(product: Product, inputs: dict[str, Tensor], name: str, expert: int) -> Tensor:
    """One expert's [out, in] in fp32."""
    scales = None if product.storage == PLAIN else inputs[f"{name}_scales"][expert].float()
    return _WIDEN[product.storage](product, inputs[name][expert], scales)


def _widen_plain(product: Product, stored: Tensor, scales: Tensor) -> Tensor:
    return stored.float()


def _widen_fp8(product: Product, stored: Tensor, scales: Tensor) -> Tensor:
    return stored.view(torch.float8_e4m3fn).float() * scales


def _widen_blocks(product: Product, stored: Tensor, scales: Tensor) -> Tensor:
    factors = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (stored.view(torch.float8_e4m3fn).float() * factors)[: product.out, : product.inner]


def _widen_int4(product: Product, stored: Tensor, scales: Tensor) -> Tensor:
    nibbles = torch.stack([stored << 4 >> 4, stored >> 4], 1).reshape(product.out, product.inner)
    return nibbles.float() * scales.t().repeat_interleave(product.group, 1)


_WIDEN: dict[str, Callable[..., Tensor]] = {
    PLAIN: _widen_plain,
    FP8: _widen_fp8,
    FP8_BLOCKS: _widen_blocks,
    INT4: _widen_int4,
}
