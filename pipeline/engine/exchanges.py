"""What the ranks of a parallel model send each other, from the plan: bytes of one token, of all ranks together, to
others. Exact for experts that are drawn evenly; no model draws them quite so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import TYPE_CHECKING

from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.operation import BYTES

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.sharding import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayer:
    """A routed layer: `chosen` of the experts for each token, out of `kept` of `groups` groups."""

    dtype: str
    hidden: int
    experts: int
    chosen: int
    groups: int = 1
    kept: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One kind: how many of them a token takes part in, and the bytes of each, there and back. used: whether the
    config's engines exchange so; else it is what they could do instead."""

    what: str
    count: int
    there: float
    back: float = 0.0
    used: bool = True

    @property
    def nbytes(self) -> float:
        return self.count * (self.there + self.back)


def describe_layer(architecture: Architecture, dtype: str) -> RoutedLayer:
    """Of a model that has routed layers."""
    experts = architecture.experts
    assert experts is not None
    grouped = experts.topk_method != "greedy"
    return RoutedLayer(
        dtype=dtype,
        hidden=architecture.hidden_size,
        experts=experts.num_routed,
        chosen=experts.top_k,
        groups=experts.n_group if grouped else 1,
        kept=experts.topk_group if grouped else 1,
    )


def hit_rank(layer: RoutedLayer, ranks: int) -> Fraction:
    """The probability that a rank has one of a token's experts. Groups are drawn first, then experts of them; ranks
    hold a part of a group, or whole groups."""
    held, size = layer.experts // ranks, layer.experts // layer.groups
    open_to = layer.kept * size  # experts that can be drawn
    whole = max(held // size, 1)  # groups that the rank has a part in
    inside = min(held, size)  # its experts of each
    missed = Fraction(0)
    for kept in range(min(whole, layer.kept) + 1):
        ways = comb(whole, kept) * comb(layer.groups - whole, layer.kept - kept)
        none = Fraction(comb(open_to - kept * inside, layer.chosen), comb(open_to, layer.chosen))
        missed += Fraction(ways, comb(layer.groups, layer.kept)) * none
    return 1 - missed


def make_operations(layer: RoutedLayer, ranks: int, payload: str) -> tuple[MoeDispatch, MoeCombine]:
    sizes = {"ranks": ranks, "experts": layer.experts, "top_k": layer.chosen, "hidden": layer.hidden}
    dispatch = MoeDispatch(dtype=layer.dtype, payload=payload, first=0, **sizes)
    return dispatch, MoeCombine(dtype=layer.dtype, first=0, **sizes)


def expect_sparse(layer: RoutedLayer, ranks: int, payload: str) -> tuple[float, float]:
    """By moe_all_to_all: there, and back. The counts, 4 bytes a rank and step, are left out."""
    dispatch, combine = make_operations(layer, ranks, payload)
    elsewhere = (ranks - 1) * hit_rank(layer, ranks)
    return float(elsewhere * dispatch.message.bytes), float(elsewhere * combine.row_bytes)


def pad(layer: RoutedLayer, ranks: int) -> tuple[int, int]:
    """By the native lowering: room for min(k, E / P) rows and expert numbers at each rank; as many rows come back."""
    rows = (ranks - 1) * min(layer.chosen, layer.experts // ranks)
    row = BYTES[layer.dtype] * layer.hidden
    return rows * (row + 4), rows * row


def reduce_all(dtype: str, hidden: int, ranks: int) -> int:
    """A ring: every rank has a row for the token, and sends its sums on, then the totals."""
    return 2 * (ranks - 1) * BYTES[dtype] * hidden


def plan_exchanges(
    architecture: Architecture, dtype: str, parallel: Parallel, *, payload: str, by_plugin: bool
) -> Iterator[Exchange]:
    """All that a token of a step is in; its logits apart, which only its last one has. by_plugin: the lowering of
    moe_all_to_all."""
    tensor, hidden = parallel.tensor, architecture.hidden_size
    if tensor > 1:
        # Of the embedding, of attention and MLP of each layer. Every stage has its own layers.
        count = 1 + 2 * architecture.num_layers
        yield Exchange(what="all-reduce", count=count, there=reduce_all(dtype, hidden, tensor))
    if parallel.pipeline > 1:
        handed = tensor * BYTES[dtype] * hidden
        yield Exchange(what="hidden states to the next stage", count=parallel.pipeline - 1, there=handed)
    if parallel.expert == 1 or architecture.experts is None:
        return
    layer, ranks = describe_layer(architecture, dtype), parallel.expert
    routed = sum(map(architecture.is_routed, range(architecture.num_layers)))
    ways = {
        ("moe_all_to_all, 16-bit rows" if BYTES[dtype] == 2 else "moe_all_to_all", by_plugin and payload == "model"): (
            expect_sparse(layer, ranks, "model")
        ),
        ("moe_all_to_all, FP8 rows", by_plugin and payload == "fp8"): expect_sparse(layer, ranks, "fp8"),
        ("native all-to-all, padded", not by_plugin): pad(layer, ranks),
    }
    # Each share of the experts' columns is exchanged among ranks of its own.
    for (what, used), (there, back) in ways.items():
        shares = parallel.moe_tensor
        yield Exchange(what=what, count=routed, there=shares * there, back=shares * back, used=used)
