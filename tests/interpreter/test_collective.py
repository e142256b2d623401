"""Collectives of TensorRT, among ranks that are threads here; torch itself is the reference. Processes over gloo are in
tests/network/test_parallel.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.interpreter.errors import ExecutionError, UnsupportedLayerError
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import collective
from pipeline.network.readback import Program
from plugins.transport import Traffic
from tests.interpreter.networks import feed, read

RANKS = (2, 3, 4)
HERE = threading.local()


class Meeting:
    """A transport among threads, each of which says in `HERE.rank` who it is."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.traffic = ranks, Traffic()
        self._barrier, self._sent = threading.Barrier(ranks, timeout=20), dict[int, tuple[torch.Tensor, Any]]()

    @property
    def rank(self) -> int:
        return int(HERE.rank)

    def exchange(
        self, source: torch.Tensor, target: torch.Tensor, sends: Sequence[int], receives: Sequence[int], stream: int
    ) -> None:
        self._sent[self.rank] = source, sends
        self._barrier.wait()
        parts = [self._sent[rank][0].split(list(self._sent[rank][1]))[self.rank] for rank in range(self.ranks)]
        assert [len(part) for part in parts] == list(receives)
        target.copy_(torch.cat(parts))
        self._barrier.wait()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.Tensor]]:
    """Runs a program of input x on every rank → its y on each."""

    def ask(program: Program, *inputs: torch.Tensor, mode: Any = "exact") -> list[torch.Tensor]:
        meeting = Meeting(len(inputs))
        groups = {(RANKS[0], len(RANKS)): meeting}
        monkeypatch.setattr(collective, "find_group", lambda first, ranks: groups[first, ranks])

        def run(rank: int) -> torch.Tensor:
            HERE.rank = rank
            return Interpreter(program, mode=mode).run({"x": inputs[rank]})["y"]

        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(run, range(len(inputs))))

    return ask


def _inputs(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(8 * torch.randn(shape, generator=generator)).to(dtype) for _ in RANKS]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_all_reduce_sums(dtype: str, ask: Any) -> None:
    """In fp32, rounded once, in the order of the ranks: every rank has the same bits."""
    program = read(lambda g: {"y": g.all_reduce("y", feed(g, "x", dtype, (-1, 4)), RANKS)}, dtype="float16")
    inputs = _inputs(getattr(torch, dtype), 5, 4)
    wide = [x.float() if x.is_floating_point() else x for x in inputs]
    for y in ask(program, *inputs, mode="declared"):
        assert torch.equal(y, ((wide[0] + wide[1]) + wide[2]).to(y.dtype))
        assert y.dtype == getattr(torch, dtype)


def test_one_rank_has_nothing_to_sum() -> None:
    program = read(lambda g: {"y": g.identity("y", g.all_reduce("sum", feed(g, "x", "float32", (-1, 4)), (0,)))})
    assert [node.kind for node in program.nodes] == ["identity"]


def test_all_gather_puts_ranks_below_each_other(ask: Any) -> None:
    program = read(lambda g: {"y": g.all_gather("y", feed(g, "x", "float16", (-1, 4)), RANKS)}, dtype="float16")
    inputs = _inputs(torch.float16, 5, 4)
    for y in ask(program, *inputs, mode="declared"):
        assert torch.equal(y, torch.cat(inputs))


def test_all_to_all_exchanges_entries(ask: Any) -> None:
    program = read(lambda g: {"y": g.all_to_all("y", feed(g, "x", "int32", (3, -1, 4)), RANKS)})
    inputs = _inputs(torch.int32, 3, 2, 4)
    for rank, y in enumerate(ask(program, *inputs)):
        assert torch.equal(y, torch.stack([x[rank] for x in inputs]))


def test_steps_without_rows(ask: Any) -> None:
    program = read(lambda g: {"y": g.all_to_all("y", feed(g, "x", "float32", (3, -1, 4)), RANKS)})
    assert [y.shape for y in ask(program, *[torch.empty(3, 0, 4)] * 3)] == [(3, 0, 4)] * 3


def test_as_many_entries_as_ranks(ask: Any) -> None:
    program = read(lambda g: {"y": g.all_to_all("y", feed(g, "x", "float32", (-1, 4)), RANKS)})
    with pytest.raises(ExecutionError, match="4 entries are exchanged among 3 ranks"):
        ask(program, *[torch.zeros(4, 4)] * 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": [0, 2]}, r"ranks \[0, 2\] are not neighbours"),
        ({"op": "broadcast"}, "op 'broadcast' is not executed"),
        ({"reduce": "max"}, "reduce 'max' is not executed"),
    ],
)
def test_what_is_not_executed(change: dict[str, Any], problem: str) -> None:
    program = read(lambda g: {"y": g.all_reduce("y", feed(g, "x", "float32", (-1, 4)), RANKS)})
    (node,) = program.nodes
    changed = replace(node, attributes={**node.attributes, **({"reduce": "none"} if "op" in change else {}), **change})
    with pytest.raises(UnsupportedLayerError, match=problem):
        Interpreter(replace(program, nodes=(changed,)), mode="exact")
