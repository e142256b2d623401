"""Bytes that a token of a routed layer costs between ranks: by moe_all_to_all, by padded splits, by an all-reduce.

    python -m benchmarks.all_to_all             # DeepSeek-V3 at EP 8, 32, 64: expected, computed exactly
    python -m benchmarks.all_to_all --run 8     # and counted: 8 processes exchange over gloo, beside the expectation

Bytes are what one token makes all ranks together send to others. Its experts are drawn evenly: 8 of the 256, or, as V3
limits them, 8 of those in 4 of 8 groups. Counts, not times: the same on every machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import TYPE_CHECKING

from plugins.moe_all_to_all.message import PAYLOADS
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch

if TYPE_CHECKING:
    import torch

SIZES = (8, 32, 64)
TOKENS = 64  # of each rank, in a run
NAMES = {"model": "16-bit", "fp8": "FP8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A routed layer: `chosen` of the experts for each token, out of `kept` of `groups` groups."""

    hidden: int
    experts: int
    chosen: int
    groups: int
    kept: int


V3 = Layer(hidden=7168, experts=256, chosen=8, groups=8, kept=4)
Drawing = Callable[[Layer, int], Fraction]


def hit_any(layer: Layer, ranks: int) -> Fraction:
    """The probability that a rank has one of a token's experts, when they are drawn from all."""
    held = layer.experts // ranks
    return 1 - Fraction(comb(layer.experts - held, layer.chosen), comb(layer.experts, layer.chosen))


def hit_kept(layer: Layer, ranks: int) -> Fraction:
    """The same, when groups are drawn first. Ranks hold a part of a group, or whole groups."""
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


DRAWINGS: dict[str, Drawing] = {"any 8 of 256": hit_any, "8 in 4 of 8 groups": hit_kept}


def make_operations(layer: Layer, ranks: int, payload: str) -> tuple[MoeDispatch, MoeCombine]:
    sizes = {"ranks": ranks, "experts": layer.experts, "top_k": layer.chosen, "hidden": layer.hidden}
    dispatch = MoeDispatch(dtype="bfloat16", payload=payload, first=0, **sizes)
    return dispatch, MoeCombine(dtype="bfloat16", first=0, **sizes)


def expect(layer: Layer, ranks: int, payload: str, draw: Drawing) -> tuple[float, float]:
    """Bytes of a token by moe_all_to_all: there, and back. The counts, 4 bytes a rank and step, are left out."""
    dispatch, combine = make_operations(layer, ranks, payload)
    elsewhere = (ranks - 1) * draw(layer, ranks)
    return float(elsewhere * dispatch.message.bytes), float(elsewhere * combine.row_bytes)


def pad(layer: Layer, ranks: int) -> tuple[float, float]:
    """The native lowering: room for min(k, E / P) rows and expert numbers at each rank; as many rows come back."""
    rows = (ranks - 1) * min(layer.chosen, layer.experts // ranks)
    return rows * (2.0 * layer.hidden + 4), rows * 2.0 * layer.hidden


def reduce_all(layer: Layer, ranks: int) -> float:
    """A ring: every rank has every token, and sends its sums on, then the totals."""
    return 2 * (ranks - 1) * 2.0 * layer.hidden


def print_plan(layer: Layer) -> None:
    print(f"{'KB a token, all ranks together':<54}" + "".join(f"{f'EP {ranks}':>20}" for ranks in SIZES))
    for title, draw in DRAWINGS.items():
        shares = [f"{float((ranks - 1) * draw(layer, ranks)):.2f} of {ranks - 1}" for ranks in SIZES]
        print(f"{f'other ranks that a token goes to, {title}':<54}" + "".join(f"{share:>20}" for share in shares))
        for payload in PAYLOADS:
            print_row(f"moe_all_to_all, {NAMES[payload]}", [expect(layer, ranks, payload, draw) for ranks in SIZES])
    print_row("padded all-to-all (native)", [pad(layer, ranks) for ranks in SIZES])
    print_row("all-reduce", [(reduce_all(layer, ranks),) for ranks in SIZES])


def print_row(name: str, cells: Sequence[Sequence[float]]) -> None:
    """There + back = total."""
    texts = [" + ".join(f"{part / 1000:.0f}" for part in parts) for parts in cells]
    totals = [
        f"{text} = {sum(parts) / 1000:.0f}" if len(parts) > 1 else text
        for text, parts in zip(texts, cells, strict=True)
    ]
    print(f"{name:<54}" + "".join(f"{total:>20}" for total in totals))


def draw_tokens(layer: Layer, groups: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one rank, their experts and weights; experts are drawn from so many groups."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    best = torch.rand(TOKENS, layer.groups, generator=generator).topk(groups, 1).indices
    open_to = torch.zeros(TOKENS, layer.groups).scatter_(1, best, 1.0)
    scores = torch.rand(TOKENS, layer.groups, layer.experts // layer.groups, generator=generator)
    weights, ids = (scores * open_to.unsqueeze(2)).flatten(1).topk(layer.chosen, 1)
    return torch.randn(TOKENS, layer.hidden, generator=generator).bfloat16(), ids.int(), weights


def exchange_tokens(rank: int, ranks: int, layer: Layer, folder: str) -> list[int]:
    """One rank's part in a run → bytes of its tokens there and back, by drawing and then by payload. Raises
    AssertionError where those counted are not those of its tokens' ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from plugins.gloo import find_group

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet, patience = f"file://{folder}/meet", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=meet, timeout=patience, rank=rank, world_size=ranks)
    counted = []
    for groups in (layer.groups, layer.kept):
        x, ids, weights = draw_tokens(layer, groups, rank)
        elsewhere = sum(len(set(row) - {rank}) for row in (ids // (layer.experts // ranks)).tolist())
        for payload in PAYLOADS:
            dispatch, combine = make_operations(layer, ranks, payload)
            rows, _, _, places, counts = dispatch.compute(x, ids, weights)
            combine.compute(rows, places, counts)
            taken = find_group(0, ranks).traffic.take()
            there, back = taken["dispatch"].sent, taken["combine"].received
            assert (there, back) == (elsewhere * dispatch.message.bytes, elsewhere * combine.row_bytes)
            assert taken["counts"].sent == 4 * (ranks - 1)
            counted.append(there + back)
    dist.destroy_process_group()
    return counted


def run_ranks(layer: Layer, ranks: int) -> list[float]:
    """Bytes of a token there and back, counted, by drawing and then by payload."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, mp_context=spawn) as pool:
        running = [pool.submit(exchange_tokens, rank, ranks, layer, folder) for rank in range(ranks)]
        found = [rank.result() for rank in running]
    return [sum(counted) / (ranks * TOKENS) for counted in zip(*found, strict=True)]


def print_run(layer: Layer, ranks: int) -> None:
    print(f"\n{f'counted over gloo, EP {ranks}, {TOKENS} tokens of each rank':<54}{'KB':>10}{'expected':>10}")
    counted = iter(run_ranks(layer, ranks))
    for title, draw in DRAWINGS.items():
        for payload in PAYLOADS:
            found, wanted = next(counted) / 1000, sum(expect(layer, ranks, payload, draw)) / 1000
            print(f"{f'{title}, {NAMES[payload]}':<54}{found:>10.1f}{wanted:>10.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, metavar="RANKS", help="exchange over gloo, one process a rank, and count")
    options = parser.parse_args(arguments)
    print_plan(V3)
    if options.run:
        print_run(V3, options.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
