"""Attention of chunks of several rows over the blocks of the cache, in C, against float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.interpreter.numerics import Numerics
from pipeline.interpreter.operations import page_calls, paged_attention
from pipeline.interpreter.operations.site import Site
from pipeline.network.program import Node, TensorSpec

SIZE, WIDTH, V_WIDTH = 32, 24, 64


@dataclass(frozen=True)
class Step:
    """Chunks of `counts` rows that end at `lengths`, packed in an order of their own."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    bias: Tensor
    pad: Tensor
    unpad: Tensor

    def inputs(self, group: int) -> tuple[Any, ...]:
        bias = self.bias.repeat(1, 1, group, 1) if self.bias.shape[2] > 1 else self.bias
        return self.q, self.k, self.v, self.table, None, bias, self.pad, self.pad.flatten(), self.unpad, self.unpad


def draw(heads: int, kv_heads: int, counts: list[int], lengths: list[int]) -> Step:
    """Blocks in no order. What nobody wrote is NaN: rows behind a sequence's end, and block 0, with which the table is
    padded."""
    generator = torch.Generator().manual_seed(heads + sum(counts) + sum(lengths))
    batch, columns, queries = len(counts), max(-(-length // SIZE) for length in lengths), max(counts)
    table = torch.zeros(batch, columns, dtype=torch.int32)
    k = torch.full((batch * columns + 1, kv_heads, SIZE, WIDTH), math.nan)
    v = torch.full((batch * columns + 1, kv_heads, SIZE, V_WIDTH), math.nan)
    free = torch.randperm(batch * columns, generator=generator).int() + 1
    for row, length in enumerate(lengths):
        used = -(-length // SIZE)
        table[row, :used], free = free[:used], free[used:]
        for place in range(length):
            block, offset = table[row, place // SIZE], place % SIZE
            k[block, :, offset] = torch.randn(kv_heads, WIDTH, generator=generator)
            v[block, :, offset] = torch.randn(kv_heads, V_WIDTH, generator=generator)
    order = torch.randperm(sum(counts), generator=generator).int()
    pad = torch.zeros(batch, queries, dtype=torch.int32)
    unpad = torch.zeros(sum(counts), dtype=torch.int32)
    bias = torch.full((batch, 1, queries, columns * SIZE), -math.inf)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        mine, order = order[:count], order[count:]
        pad[row] = mine[torch.arange(queries).clamp(max=count - 1)]
        unpad[mine.long()] = row * queries + torch.arange(count, dtype=torch.int32)
        for i in range(queries):
            seen = length - count + min(i, count - 1) + 1
            bias[row, 0, i, :seen] = torch.randn(seen, generator=generator)
    return Step(torch.randn(sum(counts), heads, WIDTH, generator=generator), k, v, table, bias, pad, unpad)


def compile_kernel(monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int) -> Any:
    """Which refuses to compute otherwise than in C."""
    monkeypatch.setattr(Numerics, "held", lambda *_: torch.float32)
    specs = (
        TensorSpec(name="q", dtype="float32", shape=(-1, heads, WIDTH)),
        TensorSpec(name="k", dtype="float32", shape=(-1, kv_heads, SIZE, WIDTH)),
        TensorSpec(name="v", dtype="float32", shape=(-1, kv_heads, SIZE, V_WIDTH)),
    )
    output = TensorSpec(name="y", dtype="float32", shape=(-1, heads * V_WIDTH))
    node = Node(kind="attend_packed", name="a", inputs=("q", "k", "v"), outputs=(output,), attributes={})
    none: Any = None
    site = Site(node=node, inputs=specs, numerics=Numerics("fast"), constant=none, parts=none, prepare=none)
    kernel = paged_attention.compile_attend_packed(site)
    assert isinstance(kernel, paged_attention.NativeKernel), "no C compiler with OpenMP"

    def otherwise(*_: Any) -> Any:
        raise NotImplementedError

    return replace(kernel, otherwise=otherwise)


def expected(step: Step) -> Tensor:
    """float64, one row and head at a time."""
    rows, heads, _ = step.q.shape
    group, queries = heads // step.k.shape[1], step.pad.shape[1]
    result = torch.empty(rows, heads, V_WIDTH, dtype=torch.float64)
    for row in range(rows):
        b, i = divmod(int(step.unpad[row]), queries)
        bias = step.bias[b, 0, min(i, step.bias.shape[2] - 1)].double()
        seen = bias > -math.inf
        for head in range(heads):
            keys, values = (
                torch.cat([pool[block, head // group] for block in step.table[b].tolist()]).double()[seen]
                for pool in (step.k, step.v)
            )
            result[row, head] = torch.softmax(keys @ step.q[row, head].double() + bias[seen], dim=-1) @ values
    return result.flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (80, 1)])
@pytest.mark.parametrize(
    ("counts", "lengths"),
    [([5], [5]), ([1, 3], [40, 3]), ([33, 1, 7], [33, 100, 64]), ([70], [130]), ([2, 2], [2, 32])],
)
def test_chunks(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, counts: list[int], lengths: list[int]
) -> None:
    step = draw(heads, kv_heads, counts, lengths)
    y = compile_kernel(monkeypatch, heads, kv_heads)(*step.inputs(heads // kv_heads))
    torch.testing.assert_close(y.double(), expected(step), rtol=5e-6, atol=5e-6)


def test_padding_may_be_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    step = draw(4, 2, [9, 5], [70, 5])
    step.pad[1, 5:] = step.pad[0, 0]
    y = compile_kernel(monkeypatch, 4, 2)(*step.inputs(2))
    torch.testing.assert_close(y.double(), expected(step), rtol=5e-6, atol=5e-6)


def test_scores_that_no_exponential_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks before and after the largest."""
    step = draw(4, 2, [70], [130])
    step.q.mul_(100)
    y = compile_kernel(monkeypatch, 4, 2)(*step.inputs(2))
    torch.testing.assert_close(y.double(), expected(step), rtol=1e-3, atol=1e-3)


def test_one_bias_for_all_queries_and_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    step = draw(6, 2, [3, 3], [40, 40])
    step = replace(step, bias=step.bias[:1, :, :1])
    wide = replace(step, bias=step.bias.expand(2, 1, 3, 64))
    y = compile_kernel(monkeypatch, 6, 2)(*step.inputs(3))
    torch.testing.assert_close(y.double(), expected(wide), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    step, kernel = draw(6, 2, [70, 20], [130, 20]), compile_kernel(monkeypatch, 6, 2)
    alone = kernel(*step.inputs(3))
    monkeypatch.setattr(page_calls, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(kernel(*step.inputs(3)), alone)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_sequence_alone(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    step, kernel = draw(4, 2, [9, 5], [40, 5]), compile_kernel(monkeypatch, 4, 2)
    alone = kernel(*step.inputs(2))
    step.k[int(step.table[0, 0]), :, 3] = value
    y = kernel(*step.inputs(2))
    mine = step.unpad < step.pad.shape[1]
    assert y[mine].isnan().any(dim=1).all() and torch.equal(y[~mine], alone[~mine])


def test_a_row_without_keys_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    step = draw(4, 2, [2], [13])
    step.bias[0, 0, 1] = -math.inf
    y = compile_kernel(monkeypatch, 4, 2)(*step.inputs(2))
    assert y[step.pad[0, 1]].isnan().all() and not y[step.pad[0, 0]].isnan().any()


@pytest.mark.parametrize(("name", "value"), [("table", -1), ("table", 7), ("pad", 14), ("unpad", 13), ("unpad", -1)])
def test_places_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    step = draw(4, 2, [9, 5], [70, 5])
    assert (len(step.k), len(step.q)) == (7, 14)
    getattr(step, name).view(-1)[0] = value
    with pytest.raises(IndexError, match="none of the 7 of the cache, or rows are not packed again"):
        compile_kernel(monkeypatch, 4, 2)(*step.inputs(2))


def test_pools_of_unequal_sizes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = draw(4, 2, [9, 5], [70, 5])
    with pytest.raises(NotImplementedError):
        compile_kernel(monkeypatch, 4, 2)(*replace(step, v=step.v[:-1]).inputs(2))


@pytest.mark.parametrize("cut", [(slice(2),), (..., slice(5), slice(None)), (..., slice(-SIZE))])
def test_a_bias_of_others_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, cut: tuple[Any, ...]) -> None:
    """Which says what is wrong: nothing is read that is not there."""
    step = draw(4, 4, [9, 5, 2], [70, 5, 2])
    with pytest.raises(NotImplementedError):
        compile_kernel(monkeypatch, 4, 4)(*replace(step, bias=step.bias[cut].contiguous()).inputs(1))
