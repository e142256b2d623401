"""Bytes that a token of a routed layer costs between ranks: by moe_all_to_all, by padded splits, by an all-reduce.

    python -m benchmarks.all_to_all             # DeepSeek-V3 at EP 8, 32, 64: expected, computed exactly
    python -m benchmarks.all_to_all --run 8     # and counted: 8 processes exchange over gloo, beside the expectation

Bytes are what one token makes all ranks together send to others. Its experts are drawn evenly: 8 of the 256, or, as V3
limits them, 8 of those in 4 of 8 groups. Counts, not times: the same on every machine. What moe_all_to_all sends is
counted where it is handed to gloo, and is what its tokens' ranks make, to the byte; padded splits and the all-reduce,
which is gloo's own, are counted on the wire.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.wire import count_sent
from pipeline.engine.exchanges import RoutedLayer, expect_sparse, hit_rank, make_operations, pad, reduce_all
from plugins.moe_all_to_all.message import PAYLOADS
from plugins.operation import BYTES

if TYPE_CHECKING:
    import torch

SIZES = (8, 32, 64)
TOKENS = 64  # of each rank, in a run
FEW_TOKENS = 4  # … of what costs the same for every token, and up to ten times as much
NAMES = {"model": "16-bit", "fp8": "FP8"}
PADDED, REDUCED = "padded all-to-all (native)", "all-reduce"
V3 = RoutedLayer(dtype="bfloat16", hidden=7168, experts=256, chosen=8, groups=8, kept=4)
# How experts are drawn -> from how many groups, of how many.
DRAWINGS: dict[str, Callable[[RoutedLayer], RoutedLayer]] = {
    "any 8 of 256": lambda layer: replace(layer, kept=layer.groups),
    "8 in 4 of 8 groups": lambda layer: layer,
}


def print_plan(layer: RoutedLayer) -> None:
    print(f"{'KB a token, all ranks together':<54}" + "".join(f"{f'EP {ranks}':>20}" for ranks in SIZES))
    for title, draw in DRAWINGS.items():
        drawn = draw(layer)
        shares = [f"{float((ranks - 1) * hit_rank(drawn, ranks)):.2f} of {ranks - 1}" for ranks in SIZES]
        print(f"{f'other ranks that a token goes to, {title}':<54}" + "".join(f"{share:>20}" for share in shares))
        for payload in PAYLOADS:
            print_row(f"moe_all_to_all, {NAMES[payload]}", [expect_sparse(drawn, ranks, payload) for ranks in SIZES])
    print_row(PADDED, [pad(layer, ranks) for ranks in SIZES])
    print_row(REDUCED, [(reduce_all(layer.dtype, layer.hidden, ranks),) for ranks in SIZES])


def print_row(name: str, cells: Sequence[Sequence[float]]) -> None:
    """There + back = total."""
    texts = [" + ".join(f"{part / 1000:.0f}" for part in parts) for parts in cells]
    totals = [
        f"{text} = {sum(parts) / 1000:.0f}" if len(parts) > 1 else text
        for text, parts in zip(texts, cells, strict=True)
    ]
    print(f"{name:<54}" + "".join(f"{total:>20}" for total in totals))


def draw_tokens(layer: RoutedLayer, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one rank, their experts and weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    best = torch.rand(TOKENS, layer.groups, generator=generator).topk(layer.kept, 1).indices
    open_to = torch.zeros(TOKENS, layer.groups).scatter_(1, best, 1.0)
    scores = torch.rand(TOKENS, layer.groups, layer.experts // layer.groups, generator=generator)
    weights, ids = (scores * open_to.unsqueeze(2)).flatten(1).topk(layer.chosen, 1)
    x = torch.randn(TOKENS, layer.hidden, generator=generator).to(getattr(torch, layer.dtype))
    return x, ids.int(), weights


def exchange_tokens(rank: int, ranks: int, layer: RoutedLayer, folder: str) -> list[float]:
    """One rank's part in a run → bytes of one of its tokens, there and back: by moe_all_to_all, by drawing and then by
    payload; by padded splits; of a token of every rank, by an all-reduce. Raises AssertionError where what
    moe_all_to_all counted is not what its tokens' ranks make."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from plugins.gloo import find_group

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet, patience = f"file://{folder}/meet", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=meet, timeout=patience, rank=rank, world_size=ranks)
    counted = []
    for draw in DRAWINGS.values():
        x, ids, weights = draw_tokens(draw(layer), rank)
        elsewhere = sum(len(set(row) - {rank}) for row in (ids // (layer.experts // ranks)).tolist())
        for payload in PAYLOADS:
            dispatch, combine = make_operations(layer, ranks, payload)
            rows, _, _, places, counts = dispatch.compute(x, ids, weights)
            combine.compute(rows, places, counts)
            taken = find_group(0, ranks).traffic.take()
            there, back = taken["dispatch"].sent, taken["combine"].received
            assert (there, back) == (elsewhere * dispatch.message.bytes, elsewhere * combine.row_bytes)
            assert taken["counts"].sent == 4 * (ranks - 1)
            counted.append((there + back) / TOKENS)
    counted += _count_dense(layer, ranks)
    dist.destroy_process_group()
    return counted


def _count_dense(layer: RoutedLayer, ranks: int) -> list[float]:
    """What this rank sends over TCP for twice as many tokens, less what it sends for them once: gloo's own headers, as
    many in both, fall out."""
    import torch
    import torch.distributed as dist

    from pipeline.interpreter.operations.collective import COLLECTIVES
    from plugins.gloo import find_group

    exchange, group = COLLECTIVES["all_to_all"], find_group(0, ranks)
    most, element = min(layer.chosen, layer.experts // ranks), BYTES[layer.dtype]

    def send_padded(tokens: int) -> None:
        """As network/exchange.py does: rows and their experts' numbers there, rows back."""
        rows = torch.zeros((ranks, tokens * most, layer.hidden * element), dtype=torch.uint8)
        exchange(group, rows)
        exchange(group, torch.zeros((ranks, tokens * most), dtype=torch.int32))
        exchange(group, rows)

    def reduce(tokens: int) -> None:
        """In fp32 of as many bytes; every rank has all ranks' tokens."""
        dist.all_reduce(torch.zeros(ranks * tokens * layer.hidden * element // 4))

    def count(run: Callable[[int], None], tokens: int) -> int:
        before = count_sent()
        run(tokens)
        return count_sent() - before

    return [(count(run, 2 * FEW_TOKENS) - count(run, FEW_TOKENS)) / FEW_TOKENS for run in (send_padded, reduce)]


def run_ranks(layer: RoutedLayer, ranks: int) -> list[tuple[str, float, float]]:
    """What it is; bytes of a token and all ranks together, counted and expected."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, mp_context=spawn) as pool:
        running = [pool.submit(exchange_tokens, rank, ranks, layer, folder) for rank in range(ranks)]
        found = [sum(counted) / ranks for counted in zip(*(rank.result() for rank in running), strict=True)]
    expected = {
        f"{title}, {NAMES[payload]}": sum(expect_sparse(draw(layer), ranks, payload))
        for title, draw in DRAWINGS.items()
        for payload in PAYLOADS
    }
    expected |= {PADDED: sum(pad(layer, ranks)), REDUCED: reduce_all(layer.dtype, layer.hidden, ranks)}
    return [(name, counted, wanted) for counted, (name, wanted) in zip(found, expected.items(), strict=True)]


def print_run(layer: RoutedLayer, ranks: int) -> None:
    print(f"\n{f'counted over gloo, EP {ranks}, {TOKENS} tokens of each rank':<54}{'KB':>12}{'expected':>12}")
    for name, counted, wanted in run_ranks(layer, ranks):
        print(f"{name:<54}{counted / 1000:>12.3f}{wanted / 1000:>12.3f}")


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
