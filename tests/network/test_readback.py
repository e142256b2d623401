"""Every kind of layer is read back as it was written, with attributes that differ from TensorRT's defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CompatibilityError
from pipeline.network.graph import Graph
from pipeline.network.kinds import KINDS
from pipeline.network.readback import Node, Program, read_network


class Bench:
    """A small network to add layers to, below the graph writer."""

    def __init__(self) -> None:
        import tensorrt_rtx as trt

        self.trt = trt
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self.network = self.builder.create_network(0)
        self.constants: dict[str, RawTensor] = {}

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "float16") -> Any:
        return self.network.add_input(name, getattr(self.trt, dtype), shape)

    def constant(self, name: str, value: Any, dtype: str) -> Any:
        raw = RawTensor.from_numpy(np.asarray(value, dtype=dtype))
        weights = self.trt.Weights(getattr(self.trt, dtype), raw.data.ctypes.data, int(np.prod(raw.shape)))
        tensor = self.network.add_constant(raw.shape, weights).get_output(0)
        tensor.name = name
        self.constants[name] = raw
        return tensor

    def read(self) -> Program:
        return read_network(
            SimpleNamespace(trt=self.trt, network=self.network, constants=self.constants, placeholders={})
        )  # type: ignore[arg-type]

    def only(self, layer: Any) -> Node:
        layer.name = "it"
        (node,) = self.read().nodes
        assert node.name == "it"
        return node


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("mode", ["DEFAULT", "ELEMENT", "ND"])
def test_gather(mode: str, bench: Bench) -> None:
    layer = bench.network.add_gather(bench.input("x", (4, 5)), bench.input("i", (4, 2), "int32"), 1)
    layer.mode = getattr(bench.trt.GatherMode, mode)
    layer.axis = 0 if mode == "ND" else 1
    node = bench.only(layer)
    assert (node.kind, node.inputs) == ("gather", ("x", "i"))
    assert node.attributes == {"axis": layer.axis, "mode": mode.lower(), "num_elementwise_dims": 0}


def test_shuffle(bench: Bench) -> None:
    layer = bench.network.add_shuffle(bench.input("x", (-1, 6, 4)))
    layer.first_transpose = bench.trt.Permutation([1, 0, 2])
    layer.zero_is_placeholder = False
    layer.reshape_dims = (6, -1)
    layer.second_transpose = bench.trt.Permutation([1, 0])
    assert bench.only(layer).attributes == {
        "first_transpose": [1, 0, 2],
        "reshape_dims": [6, -1],
        "second_transpose": [1, 0],
        "zero_is_placeholder": False,
    }


def test_shuffle_by_an_input(bench: Bench) -> None:
    layer = bench.network.add_shuffle(bench.input("x", (-1, 6)))
    layer.set_input(1, bench.constant("dims", [2, -1], "int64"))
    node = bench.only(layer)
    assert node.inputs == ("x", "dims")
    assert node.attributes["reshape_dims"] is None
    assert node.attributes["first_transpose"] is None


def test_shuffle_that_only_transposes(bench: Bench) -> None:
    layer = bench.network.add_shuffle(bench.input("x", (3, 6)))
    layer.first_transpose = bench.trt.Permutation([1, 0])
    node = bench.only(layer)
    assert (node.attributes["first_transpose"], node.attributes["reshape_dims"]) == ([1, 0], None)
    assert node.outputs[0].shape == (6, 3)


def test_slice_of_one_axis(bench: Bench) -> None:
    layer = bench.network.add_slice(bench.input("x", (-1, 8, 3)), (2,), (3,), (2,))
    layer.axes = (1,)
    expected = {"axes": [1], "start": [2], "size": [3], "stride": [2], "mode": "strict_bounds"}
    assert bench.only(layer).attributes == expected


def test_slice_by_inputs(bench: Bench) -> None:
    layer = bench.network.add_slice(bench.input("x", (-1, 8)), (0, 1), (1, 1), (1, 2))
    layer.mode = bench.trt.SampleMode.CLAMP
    layer.set_input(2, bench.constant("size", [4, 2], "int64"))
    node = bench.only(layer)
    assert node.inputs == ("x", None, "size")
    assert node.attributes["mode"] == "clamp"
    assert (node.attributes["axes"], node.attributes["start"], node.attributes["stride"]) == (None, [0, 1], [1, 2])


@pytest.mark.parametrize("op", ["SUM", "PROD", "SUB", "DIV", "MAX", "MIN", "POW", "GREATER", "LESS", "EQUAL"])
def test_elementwise(op: str, bench: Bench) -> None:
    operation = getattr(bench.trt.ElementWiseOperation, op)
    node = bench.only(bench.network.add_elementwise(bench.input("a", (-1, 4)), bench.input("b", (1, 4)), operation))
    assert (node.kind, node.inputs, node.attributes) == ("elementwise", ("a", "b"), {"op": op.lower()})


def test_unary_and_activation(bench: Bench) -> None:
    """IActivationLayer.type hides ILayer.type."""
    first = bench.network.add_activation(bench.input("x", (-1, 4)), bench.trt.ActivationType.GELU_ERF)
    second = bench.network.add_unary(first.get_output(0), bench.trt.UnaryOperation.RECIP)
    nodes = bench.read().nodes
    assert [(node.kind, node.attributes) for node in nodes] == [
        ("activation", {"op": "gelu_erf"}),
        ("unary", {"op": "recip"}),
    ]
    assert nodes[1].inputs == (first.get_output(0).name,)
    assert nodes[1].outputs[0].name == second.get_output(0).name


def test_reduce(bench: Bench) -> None:
    layer = bench.network.add_reduce(bench.input("x", (-1, 4, 5)), bench.trt.ReduceOperation.MAX, 0b101, False)
    assert bench.only(layer).attributes == {"op": "max", "axes": [0, 2], "keep_dims": False}


def test_softmax(bench: Bench) -> None:
    layer = bench.network.add_softmax(bench.input("x", (-1, 4, 5)))
    layer.axes = 0b10
    assert bench.only(layer).attributes == {"axes": [1]}


def test_cast_shape_identity_select_and_concatenation(bench: Bench) -> None:
    x = bench.input("x", (-1, 4))
    bench.network.add_cast(x, bench.trt.bfloat16)
    bench.network.add_shape(x)
    bench.network.add_identity(x)
    bench.network.add_select(bench.input("c", (-1, 4), "bool"), x, x)
    bench.network.add_concatenation([x, x]).axis = 1
    nodes = bench.read().nodes
    assert [node.kind for node in nodes] == ["cast", "shape", "identity", "select", "concatenation"]
    assert nodes[0].attributes == {"to": "bfloat16"}
    assert nodes[0].outputs[0].dtype == "bfloat16"
    assert nodes[1].outputs[0].dtype == "int64"
    assert nodes[4].attributes == {"axis": 1}
    assert nodes[4].inputs == ("x", "x")


def test_matrix_multiply(bench: Bench) -> None:
    op = bench.trt.MatrixOperation
    a, b = bench.input("a", (4, -1)), bench.input("b", (4, 6))
    node = bench.only(bench.network.add_matrix_multiply(a, op.TRANSPOSE, b, op.NONE))
    assert node.attributes == {"op0": "transpose", "op1": "none"}


def test_rotary_embedding(bench: Bench) -> None:
    tables = [bench.constant(name, np.ones((9, 4)), "float16") for name in ("cos", "sin")]
    layer = bench.network.add_rotary_embedding(bench.input("x", (-1, 2, 3, 16)), *tables, True, 8)
    layer.set_input(3, bench.input("p", (-1, 3), "int32"))
    node = bench.only(layer)
    assert node.inputs == ("x", "cos", "sin", "p")
    assert node.attributes == {"interleaved": True, "dim": 8}


def test_kv_cache_update(bench: Bench) -> None:
    pool, rows = bench.input("pool", (-1, 2, 16, 8)), bench.input("rows", (-1, 2, 8))
    starts, lengths = bench.input("starts", (-1,), "int32"), bench.input("lengths", (-1,), "int32")
    layer = bench.network.add_kv_cache_update(pool, rows, starts, bench.trt.KVCacheMode.LINEAR)
    layer.update_form = bench.trt.AttentionIOForm.PACKED_NHD
    layer.update_lengths = lengths
    node = bench.only(layer)
    assert node.inputs == ("pool", "rows", "starts", "lengths")
    assert node.attributes == {"form": "packed_nhd", "mode": "linear"}


def _attention(bench: Bench, causal: str = "NONE") -> Any:
    q, k = bench.input("q", (-1, 4, -1, 64)), bench.input("k", (-1, 2, -1, 64))
    norm, kind = bench.trt.AttentionNormalizationOp.SOFTMAX, getattr(bench.trt.CausalMaskKind, causal)
    return bench.network.add_attention_v2(q, k, bench.input("v", (-1, 2, -1, 64)), norm, kind)


def test_attention_is_one_node(bench: Bench) -> None:
    attention = _attention(bench, "LOWER_RIGHT")
    attention.name = "it"
    attention.decomposable = True
    attention.get_output(0).name = "out"
    bench.network.add_identity(attention.get_output(0))
    node, after = bench.read().nodes
    assert (node.kind, node.name, node.inputs[:3], node.outputs[0].name) == ("attention", "it", ("q", "k", "v"), "out")
    assert node.attributes == {
        "normalization": "softmax",
        "causal": "lower_right",
        "decomposable": True,
        "query_form": "padded_bhnd",
        "key_value_form": "padded_bhnd",
    }
    assert after.inputs == ("out",)


def test_attention_mask(bench: Bench) -> None:
    attention = _attention(bench)
    attention.mask = bench.input("mask", (-1, 1, -1, -1), "bool")
    (node,) = bench.read().nodes
    assert node.inputs == ("q", "k", "v", "mask")


def test_attention_lengths_are_not_lost(bench: Bench) -> None:
    _attention(bench).key_value_lengths = bench.input("lengths", (-1,), "int32")
    with pytest.raises(CompatibilityError, match="has key_value_lengths, which cannot be read back"):
        bench.read()


@pytest.mark.parametrize("blocked", [True, False])
def test_dequantize(blocked: bool, bench: Bench) -> None:
    x = bench.input("x", (64, 6), "int8")
    scale = bench.constant("scale", np.ones((2, 6) if blocked else 6), "float16")
    layer = bench.network.add_dequantize(x, scale, bench.trt.float16)
    if blocked:
        layer.block_shape = (32, 1)
    else:
        layer.axis = 1
    attributes = bench.only(layer).attributes
    assert (attributes["block_shape"], attributes["to"]) == ([32, 1] if blocked else None, "float16")
    assert blocked or attributes["axis"] == 1


def test_quantize(bench: Bench) -> None:
    layer = bench.network.add_quantize(bench.input("x", (64, 6)), bench.constant("s", 0.5, "float16"), bench.trt.fp8)
    assert bench.only(layer).attributes["to"] == "fp8"


def test_topk(bench: Bench) -> None:
    layer = bench.network.add_topk(bench.input("x", (-1, 9)), bench.trt.TopKOperation.MIN, 3, 0b10)
    node = bench.only(layer)
    assert node.attributes == {"op": "min", "k": 3, "axes": [1]}
    assert [output.dtype for output in node.outputs] == ["float16", "int32"]


def test_one_hot(bench: Bench) -> None:
    values, depth = bench.constant("values", [0, 1], "float32"), bench.constant("depth", 7, "int32")
    node = bench.only(bench.network.add_one_hot(bench.input("i", (-1, 2), "int32"), values, depth, 1))
    assert (node.inputs, node.attributes) == (("i", "values", "depth"), {"axis": 1})
    assert node.outputs[0].shape == (-1, 7, 2)


def test_fill(bench: Bench) -> None:
    layer = bench.network.add_fill((5,), bench.trt.FillOperation.LINSPACE, bench.trt.float32)
    layer.alpha, layer.beta = 2.0, 0.5
    expected = {"op": "linspace", "shape": [5], "alpha": 2.0, "beta": 0.5, "to": "float32"}
    assert bench.only(layer).attributes == expected


def test_nodes_come_in_an_order_that_can_be_executed(bench: Bench) -> None:
    """A layer may be given the output of one written after it."""
    x = bench.input("x", (-1, 4))
    first = bench.network.add_identity(x)
    second = bench.network.add_unary(x, bench.trt.UnaryOperation.NEG)
    first.name, second.name = "first", "second"
    first.set_input(0, second.get_output(0))
    assert [node.name for node in bench.read().nodes] == ["second", "first"]


def test_an_unknown_kind_is_refused(bench: Bench) -> None:
    bench.network.add_cumulative(
        bench.input("x", (-1, 4)), bench.constant("axis", 1, "int32"), bench.trt.CumulativeOperation.SUM, False, False
    ).name = "running"
    with pytest.raises(CompatibilityError, match="layer running is of kind CUMULATIVE"):
        bench.read()


def test_a_constant_without_a_reference_is_refused(bench: Bench) -> None:
    bench.network.add_identity(bench.constant("orphan", [1.0], "float32"))
    del bench.constants["orphan"]
    with pytest.raises(CompatibilityError, match="constants orphan are in the network or among its references"):
        bench.read()


def test_every_kind_names_a_class_of_tensorrt() -> None:
    import tensorrt_rtx as trt

    for name, kind in KINDS.items():
        assert hasattr(trt.LayerType, name)
        assert issubclass(getattr(trt, kind.layer), trt.ILayer)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives(op: str, bench: Bench) -> None:
    """TensorRT gives their number of ranks back and nothing else: the rest is in their metadata."""
    graph = Graph(trt=bench.trt, network=bench.network, dtype="float16", prefix="layers.3.")
    tensor = getattr(graph, op)("it", bench.input("x", (2, -1, 8)), (4, 5))
    (node,) = bench.read().nodes
    assert (node.kind, node.name, node.inputs) == ("dist_collective", "layers.3.it", ("x",))
    assert node.attributes == {"op": op, "reduce": "sum" if op == "all_reduce" else "none", "ranks": [4, 5]}
    assert tuple(tensor.shape)[1:] == (-1, 8)


def test_a_collective_that_does_not_say_what_it_is(bench: Bench) -> None:
    x, trt = bench.input("x", (-1, 8)), bench.trt
    layer = bench.network.add_dist_collective(
        x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, np.array([0, 1])
    )
    layer.num_ranks = 2
    with pytest.raises(CompatibilityError, match=r"collective it of 2 ranks has the metadata ''"):
        bench.only(layer)
    layer.metadata = '{"op": "all_reduce", "reduce": "sum", "ranks": [0, 1, 2]}'
    with pytest.raises(CompatibilityError, match=r"collective it of 2 ranks"):
        bench.only(layer)
