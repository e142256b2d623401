"""Attention over the blocks of the cache, in C and over copies, against float64."""

import math
from typing import Any

import pytest
import torch

from pipeline.interpreter.numerics import Numerics, multiplied_as
from pipeline.interpreter.operations import page_calls, paged_attention
from pipeline.interpreter.operations.site import Site
from pipeline.network.program import Node, TensorSpec

SIZE, WIDTH, V_WIDTH = 8, 24, 40
TYPES = [torch.float32, torch.bfloat16]


def compile_kernel(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, heads: int, kv_heads: int, *, native: bool
) -> Any:
    monkeypatch.setattr(Numerics, "held", lambda *_: held)
    if not native:
        monkeypatch.setattr(paged_attention, "load_library", lambda: None)
    else:
        assert paged_attention.load_library() is not None, "no C compiler with OpenMP"
    specs = [
        TensorSpec(name="q", dtype="float32", shape=(-1, heads, -1, WIDTH)),
        TensorSpec(name="k", dtype="float32", shape=(-1, kv_heads, SIZE, WIDTH)),
        TensorSpec(name="v", dtype="float32", shape=(-1, kv_heads, SIZE, V_WIDTH)),
    ]
    output = TensorSpec(name="y", dtype="float32", shape=(-1, heads, -1, V_WIDTH))
    node = Node(kind="attend_pages", name="a", inputs=("q", "k", "v"), outputs=(output,), attributes={})
    none: Any = None
    site = Site(node=node, inputs=tuple(specs), numerics=Numerics("fast"), constant=none, parts=none, prepare=none)
    return paged_attention.compile_attend_pages(site)


def draw(held: torch.dtype, heads: int, kv_heads: int, queries: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Blocks in no order; rows beyond a sequence's length are NaN where the block is nobody's."""
    generator = torch.Generator().manual_seed(heads + queries + sum(lengths))
    columns = max(-(-length // SIZE) for length in lengths)
    table = torch.zeros(len(lengths), columns, dtype=torch.int32)
    free = torch.randperm(len(lengths) * columns, generator=generator).int() + 1
    for row, length in enumerate(lengths):
        count = -(-length // SIZE)
        table[row, :count], free = free[:count], free[count:]
    blocks = len(lengths) * columns + 1
    q = torch.randn(len(lengths), heads, queries, WIDTH, generator=generator).to(held)
    k = torch.randn(blocks, kv_heads, SIZE, WIDTH, generator=generator).to(held)
    v = torch.randn(blocks, kv_heads, SIZE, V_WIDTH, generator=generator).to(held)
    bias = torch.full((len(lengths), 1, queries, columns * SIZE), -math.inf)
    for row, length in enumerate(lengths):
        bias[row, :, :, :length] = torch.randn(queries, length, generator=generator)
    return q, k, v, table, bias.to(held)


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """float64, one sequence and head at a time."""
    result = torch.empty(*q.shape[:3], V_WIDTH, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = torch.cat([k[block, head // group] for block in table[b].tolist()]).double()
            values = torch.cat([v[block, head // group] for block in table[b].tolist()]).double()
            scores = q[b, head].double() @ keys.T + bias[b, 0].double()
            result[b, head] = torch.softmax(scores, dim=-1) @ values
    return result


def rows_of(table: torch.Tensor, kv_heads: int) -> torch.Tensor:
    heads = torch.arange(kv_heads).reshape(1, -1, 1)
    return (table.long().unsqueeze(1) * kv_heads + heads).reshape(-1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [13, 40, 8], [100]])
def test_one_row_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
    held: torch.dtype,
    heads: int,
    kv_heads: int,
    lengths: list[int],
    native: bool,
) -> None:
    kernel = compile_kernel(monkeypatch, held, heads, kv_heads, native=native)
    q, k, v, table, bias = draw(held, heads, kv_heads, 1, lengths)
    y = kernel(q, k, v, table, rows_of(table, kv_heads), bias if native else bias.to(multiplied_as(held)))
    assert y.dtype is held and y.shape == (len(lengths), heads, 1, V_WIDTH)
    tolerance = 2e-6 if held is torch.float32 else 2**-6 if not native else 2**-8
    torch.testing.assert_close(y.double(), expected(q, k, v, table, bias), rtol=tolerance, atol=tolerance)


def test_several_rows_go_over_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 6, 3, native=True)
    q, k, v, table, bias = draw(torch.float32, 6, 3, 5, [20, 9])
    y = kernel(q, k, v, table, rows_of(table, 3), bias.repeat(1, 1, 2, 1))  # heads that share a key head are rows
    torch.testing.assert_close(y.double(), expected(q, k, v, table, bias), rtol=2e-6, atol=2e-6)


def test_masked_keys_are_not_read_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    rows = rows_of(table, 2)
    alone = kernel(q, k, v, table, rows, bias)
    last = int(table[0, 1])
    k[last, :, 5:], v[last, :, 5:] = math.nan, math.nan  # rows 13 to 15
    monkeypatch.setattr(page_calls, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(kernel(q, k, v, table, rows, bias), alone)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_sequence_alone(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    rows = rows_of(table, 2)
    alone = kernel(q, k, v, table, rows, bias)
    k[int(table[0, 0]), :, 3] = value
    y = kernel(q, k, v, table, rows, bias)
    assert y[0].isnan().any() and torch.equal(y[1], alone[1])


def test_a_row_without_keys_is_nan_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13])
    assert kernel(q, k, v, table, rows_of(table, 2), torch.full_like(bias, -math.inf)).isnan().all()


def test_a_table_that_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    wider = torch.full((2, 9), -1, dtype=torch.int32)
    wider[:, : table.shape[1]] = table
    y = kernel(q, k, v, wider[:, : table.shape[1]], rows_of(table, 2), bias)
    assert torch.equal(y, kernel(q, k, v, table, rows_of(table, 2), bias))


@pytest.mark.parametrize("block", [-1, 11, 2**31 - 1])
def test_a_block_that_is_none_is_refused_as_elsewhere(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    assert len(k) == 11
    table[0, 1] = block
    with pytest.raises(IndexError, match="none of the 11"):
        kernel(q, k, v, table, rows_of(table, 2), bias)


def test_a_bias_of_other_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    with pytest.raises(RuntimeError, match="expanded size"):
        kernel(q, k, v, table, rows_of(table, 2), bias[..., :-SIZE])


def test_a_bias_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [16, 16])
    y = kernel(q, k, v, table, rows_of(table, 2), bias[:1])
    torch.testing.assert_close(
        y.double(), expected(q, k, v, table, bias[:1].expand(2, -1, -1, -1)), rtol=2e-6, atol=2e-6
    )


def test_pools_of_unequal_sizes_are_refused_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, 4, 2, native=True)
    q, k, v, table, bias = draw(torch.float32, 4, 2, 1, [13, 40])
    table[0, 1] = len(k) - 1
    with pytest.raises(IndexError):
        kernel(q, k, v[:-1], table, rows_of(table, 2), bias)
