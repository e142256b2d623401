"""What routers are made of and what lays tensors out, in C, against exact mode."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.interpreter.errors import ExecutionError
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import layouts, small
from pipeline.interpreter.tape import Tape
from tests.interpreter.networks import feed, read

E, GROUPS = 12, 4


def softmax_router(g: Any) -> dict[str, Any]:
    """Scores, the best groups' experts, weights by expert: as in DeepSeek-V2."""
    scores = g.softmax("scores", feed(g, "x", "float32", (-1, E)), 1)
    grouped = g.reshape("grouped", scores, (-1, GROUPS, E // GROUPS))
    _, best = g.topk("groups", g.reduce("group_scores", grouped, "MAX", 2, keep=False), 2, 1)
    mask = g.reduce("mask", g.one_hot("one_hot", best, GROUPS), "SUM", 1, keep=False)
    kept = g.product("kept", grouped, g.reshape("column", mask, (-1, GROUPS, 1)))
    chosen, indices = g.topk("chosen", g.reshape("flat", kept, (-1, E)), 3, 1)
    total = g.reduce("total", chosen, "SUM", 1, keep=True)
    shares = g.elementwise("shares", chosen, total, "DIV")
    column = g.reshape("shares_column", shares, (0, 0, 1))
    weighted = g.product("weighted", g.one_hot("experts", indices, E), column)
    weights = g.reduce("weights", weighted, "SUM", 1, keep=False)
    return {"y": g.reshape("by_expert", weights, (E, -1, 1), first=(1, 0)), "indices": g.identity("i", indices)}


def sigmoid_router(g: Any) -> dict[str, Any]:
    """Chosen with a bias, weighed without: as in DeepSeek-V3."""
    scores = g.sigmoid("scores", feed(g, "x", "float32", (-1, E)))
    bias = g.number("bias", [[i % 5 / 7 for i in range(E)]], "float32")
    grouped = g.reshape("grouped", g.sum("corrected", scores, bias), (-1, GROUPS, E // GROUPS))
    two, _ = g.topk("best_two", grouped, 2, 2)
    _, best = g.topk("groups", g.reduce("group_scores", two, "SUM", 2, keep=False), 2, 1)
    mask = g.reduce("mask", g.one_hot("one_hot", best, GROUPS), "SUM", 1, keep=False)
    spurned = g.elementwise("spurned", g.number("one", [[1]], "float32"), mask, "SUB")
    penalty = g.product("penalty", spurned, g.number("far", [[-1e30]], "float32"))
    kept = g.sum("kept", grouped, g.reshape("column", penalty, (-1, GROUPS, 1)))
    _, indices = g.topk("chosen", g.reshape("flat", kept, (-1, E)), 3, 1)
    return {"y": g.gather_elements("picked", scores, indices, 1), "indices": g.identity("i", indices)}


def reductions(g: Any) -> dict[str, Any]:
    x = feed(g, "x", "float32", (-1, E))
    cube = g.reshape("cube", x, (-1, 3, E // 3))
    parts = [g.reduce(op, cube, op, axis, keep=True) for op, axis in (("AVG", 1), ("MIN", 1), ("MAX", 1))]
    total = g.elementwise("b", g.elementwise("a", parts[0], parts[1], "MAX"), parts[2], "MIN")
    swapped = g.reshape("swapped", g.sum("sum", cube, total), first=(0, 2, 1))
    return {"y": g.reshape("y", swapped, (-1, E)), "indices": g.reduce("m", swapped, "SUM", 2, keep=False)}


NETWORKS: list[Callable[[Any], dict[str, Any]]] = [softmax_router, sigmoid_router, reductions]


@pytest.mark.parametrize("build", NETWORKS)
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_computes_what_torch_does(
    build: Callable[[Any], dict[str, Any]], rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (small, layouts):
        monkeypatch.setattr(module, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    program, x = read(build), torch.randn(rows, E, generator=torch.Generator().manual_seed(rows))
    fast, exact = Interpreter(program, mode="fast"), Interpreter(program, mode="exact")
    steps = fast._plan(frozenset()).steps
    assert len([step for step in steps if isinstance(step, Tape)]) == 1 and len(steps) <= 2
    for _ in range(2):
        found, expected = fast.run({"x": x}), exact.run({"x": x})
        assert torch.equal(found["indices"], expected["indices"]) or build is reductions
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", NETWORKS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(build: Callable[[Any], dict[str, Any]], value: float) -> None:
    fast, x = Interpreter(read(build), mode="fast"), torch.randn(3, E, generator=torch.Generator().manual_seed(0))
    name = "y" if build is sigmoid_router else "indices"
    alone = fast.run({"x": x})[name].clone()
    x[1, 2] = value
    result = fast.run({"x": x})[name]
    assert torch.equal(result[::2], alone[::2])


def test_nan_is_the_largest_and_the_first_of_equal_ones_first() -> None:
    def build(g: Any) -> dict[str, Any]:
        values, places = g.topk("top", feed(g, "x", "float32", (-1, 5)), 3, 1)
        return {"values": g.sum("v", values, values), "places": g.identity("p", places)}

    x = torch.tensor([[1, 2, 2, 0, 2], [3, math.nan, -math.inf, math.inf, 0]])
    found = Interpreter(read(build), mode="fast").run({"x": x})
    assert found["places"].tolist() == [[1, 2, 4], [1, 3, 0]]
    assert found["values"][0].tolist() == [4, 4, 4] and bool(found["values"][1, 0].isnan())


@pytest.mark.parametrize("place", [-6, 5])
def test_a_place_that_is_none_is_refused(place: int) -> None:
    def build(g: Any) -> dict[str, Any]:
        x, places = feed(g, "x", "float32", (-1, 5)), feed(g, "places", "int32", (-1, 2))
        return {"y": g.sum("twice", g.gather_elements("picked", x, places, 1), g.number("zero", [[0]], "float32"))}

    fast, x = Interpreter(read(build), mode="fast"), torch.arange(5.0)[None]
    assert fast.run({"x": x, "places": torch.tensor([[-1, 2]], dtype=torch.int32)})["y"].tolist() == [[4, 2]]
    with pytest.raises(ExecutionError, match=r"picked.*none of 5 values"):
        fast.run({"x": x, "places": torch.tensor([[0, place]], dtype=torch.int32)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    for seen in (x, x.permute(2, 0, 3, 1), x[1:3, :, ::2], x[:, :1].expand(4, 3, 5, 2), x[0], x[:0]):
        for to in (torch.float32, torch.bfloat16):
            call = layouts.copy(torch.empty, seen, to)
            assert call is not None
            library = layouts.load_library()
            assert library is not None
            library.lay_out((call,)).run()
            assert torch.equal(call.outputs, seen.to(to)) and call.outputs.is_contiguous()


def test_lines_say_the_same_memory() -> None:
    x = torch.arange(120).view(4, 3, 5, 2)
    assert layouts.lines(x.shape, x.stride()) == [[1, 1, 4, 30], [0, 0, 30, 1]]
    assert layouts.lines((1, 1), (7, 7)) == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_views_cost_nothing_and_last_as_long_as_what_is_seen() -> None:
    """What a view shows is not written over before it is read, nor before others have it."""

    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, E))
        doubled = g.sum("doubled", x, x)
        seen = g.slice("seen", g.reshape("square", doubled, (-1, 3, E // 3)), 1, 1, 1)
        other = g.sum("other", x, g.number("one", [[1]], "float32"))
        another = g.sum("another", other, other)
        late = g.sum("late", g.reshape("flat", seen, (-1, E // 3)), g.slice("few", another, 1, 0, E // 3))
        return {"late": late, "seen": g.reshape("out", seen, (-1, E // 3)), "another": another}

    program, x = read(build), torch.randn(5, E)
    fast, exact = Interpreter(program, mode="fast"), Interpreter(program, mode="exact")
    found = fast.run({"x": x})
    kept = {name: tensor.clone() for name, tensor in found.items()}
    fast.run({"x": torch.randn(5, E)})
    for name, tensor in exact.run({"x": x}).items():
        assert torch.equal(found[name], kept[name]) and torch.equal(kept[name], tensor), name
