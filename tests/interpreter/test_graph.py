from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.interpreter.errors import UnsupportedLayerError
from pipeline.interpreter.graph import Graph, drop_unused, merge_equal
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Numerics
from tests.interpreter.networks import feed, read


def twice(g: Any) -> dict[str, Any]:
    """exp(x) written twice, each with a cast to fp16 and back, and something that nothing needs."""
    x = feed(g, "x", "float32", (-1,))
    a, b = (g.cast(f"{n}.wide", g.cast(f"{n}.half", g.unary(n, x, "EXP"), "float16"), "float32") for n in "ab")
    g.unary("unused", x, "SQRT")
    return {"y": g.sum("y", a, b)}


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_equal_nodes_run_once_and_unused_ones_not_at_all() -> None:
    program = read(twice)
    graph = drop_unused(merge_equal(Graph.of(program, ()), Numerics("declared")))
    assert names(graph) == ["a", "a.half", "a.wide", "y"]
    assert graph.nodes[-1].inputs == ("a.wide", "a.wide")


def test_casts_between_floats_are_empty_in_exact_mode() -> None:
    graph = drop_unused(merge_equal(Graph.of(read(twice), ()), Numerics("exact")))
    assert names(graph) == ["a", "y"]


def test_a_tap_keeps_its_own_node() -> None:
    graph = drop_unused(merge_equal(Graph.of(read(twice), ("b.half", "unused")), Numerics("exact")))
    assert "b.half" in names(graph) and "unused" in names(graph)


def test_nodes_that_differ_in_an_attribute_are_kept_apart() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, 4))
        return {"y": g.sum("y", g.slice("a", x, 1, 0, 2), g.slice("b", x, 1, 2, 2))}

    graph = merge_equal(Graph.of(read(build), ()), Numerics("exact"))
    assert names(graph) == ["a", "b", "y"]


def test_a_cache_that_is_read_beside_its_update_is_refused() -> None:
    def build(g: Any) -> dict[str, Any]:
        cache = feed(g, "cache", "float32", (-1, 1, 4, 2))
        update = feed(g, "update", "float32", (-1, 1, 2))
        starts, lengths = feed(g, "starts", "int32", (-1,)), feed(g, "lengths", "int32", (-1,))
        return {"out": g.update_cache("append", cache, update, starts, lengths), "y": g.unary("y", cache, "EXP")}

    with pytest.raises(UnsupportedLayerError, match=r"append.*cache is read elsewhere"):
        Interpreter(read(build), mode="exact")


def test_an_unknown_kind_is_refused_by_name() -> None:
    program = read(twice)
    strange = replace(program.nodes[0], kind="convolution")
    with pytest.raises(UnsupportedLayerError, match="layer a: convolution"):
        Interpreter(replace(program, nodes=(strange, *program.nodes[1:])), mode="exact")


def test_a_missing_attribute_is_refused_by_name() -> None:
    program = read(twice)
    with pytest.raises(UnsupportedLayerError, match=r"layer a.*op is missing"):
        Interpreter(
            replace(program, nodes=(replace(program.nodes[0], attributes={}), *program.nodes[1:])), mode="exact"
        )


def test_merging_leaves_values_alone() -> None:
    program, x = read(twice), torch.linspace(-2, 2, 9)
    for mode in ("exact", "declared"):
        plain = Interpreter(program, mode=mode, optimize=False).run({"x": x}, taps=["b.half"])
        merged = Interpreter(program, mode=mode).run({"x": x}, taps=["b.half"])
        assert all(torch.equal(plain[name], merged[name]) for name in ("y", "b.half"))
    assert plain["b.half"].dtype == torch.float16
