"""The writer's own promises: names, kept memory, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import BuildError
from pipeline.network.graph import Graph
from pipeline.network.inputs import Port

X = Port(name="x", dtype="float16", axes=("T", 8), meaning="")


@pytest.fixture
def graph() -> Graph:
    import tensorrt_rtx as trt

    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    return Graph(trt=trt, network=builder.create_network(0), dtype="float16")


def test_names_are_below_the_place(graph: Graph) -> None:
    x = graph.input(X)
    assert graph.at("layers.3").at("mlp").unary("negated", x, "NEG").name == "layers.3.mlp.negated"
    assert graph.network.get_layer(0).name == "layers.3.mlp.negated"


def test_a_name_is_used_once(graph: Graph) -> None:
    x = graph.input(X)
    graph.unary("negated", x, "NEG")
    with pytest.raises(ValueError, match="two tensors are named negated"):
        graph.unary("negated", x, "ABS")


def test_an_output_gives_up_its_place(graph: Graph) -> None:
    x = graph.input(X)
    graph.output("y", graph.unary("negated", x, "NEG"))
    graph.unary("negated", x, "ABS")
    assert graph.network.get_output(0).name == "y"


def test_a_constant_keeps_its_memory_and_its_own_shape(graph: Graph) -> None:
    raw = RawTensor.from_numpy(np.arange(8, dtype=np.float16))
    tensor = graph.constant("c", raw, (2, 4))
    assert tuple(tensor.shape) == (2, 4)
    assert graph.constants["c"].shape == (2, 4)
    assert graph.constants["c"].data is raw.data


def test_a_cast_to_the_same_type_is_no_layer(graph: Graph) -> None:
    x = graph.input(X)
    assert graph.cast("same", x, "float16") is x
    assert graph.network.num_layers == 0


def test_what_tensorrt_refuses_is_named(graph: Graph) -> None:
    x = graph.input(X)
    y = graph.input(Port(name="y", dtype="float16", axes=(5, 8, 1), meaning=""))
    with pytest.raises(BuildError, match=r"TensorRT refused layer layers\.0\.total"):
        graph.at("layers.0").sum("total", x, y)
