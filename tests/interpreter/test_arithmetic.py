from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.errors import UnsupportedLayerError
from pipeline.network.program import Node, TensorSpec
from tests.interpreter.networks import feed, program, read, run

FLOATS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": np.divide,
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
}
INTEGERS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": lambda a, b: np.trunc(a / b).astype(a.dtype),
    "FLOOR_DIV": np.floor_divide,
}
COMPARISONS = {"EQUAL": np.equal, "GREATER": np.greater, "LESS": np.less}
LOGICAL = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


def apply(op: str, dtype: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    shapes = [tuple(-1 if size > 1 else 1 for size in x.shape) for x in (a, b)]
    made = read(lambda g: {"y": g.elementwise("y", feed(g, "a", dtype, shapes[0]), feed(g, "b", dtype, shapes[1]), op)})
    return run(made, a=torch.from_numpy(a), b=torch.from_numpy(b))["y"].numpy()


@pytest.mark.parametrize("op", [*FLOATS, *COMPARISONS])
def test_elementwise_on_floats_broadcasts(op: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.uniform(0.5, 3, (4, 1, 5)).astype(np.float32)
    b = rng.uniform(0.5, 3, (1, 3, 5)).astype(np.float32)
    b[0, 0] = a[0, 0]  # something equal
    np.testing.assert_allclose(apply(op, "float32", a, b), {**FLOATS, **COMPARISONS}[op](a, b), rtol=1e-6)


@pytest.mark.parametrize("op", [*INTEGERS, *COMPARISONS])
def test_elementwise_on_integers_divides_as_c(op: str) -> None:
    a, b = np.array([[-7, 7, 6, -6]], np.int32), np.array([[2, -2, 3, 4]], np.int32)
    np.testing.assert_array_equal(apply(op, "int32", a, b), {**INTEGERS, **COMPARISONS}[op](a, b))


@pytest.mark.parametrize("op", LOGICAL)
def test_elementwise_on_booleans(op: str) -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    np.testing.assert_array_equal(apply(op, "bool", a, b), LOGICAL[op](a, b))


UNARY = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": np.reciprocal,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "SIGN": np.sign,
    "ROUND": np.round,
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    x = np.array([0.5, 1.5, 2.5, 3.25, 1e-3], np.float32)
    made = read(lambda g: {"y": g.unary("y", feed(g, "x", "float32", (-1,)), op)})
    np.testing.assert_allclose(run(made, x=torch.from_numpy(x))["y"].numpy(), UNARY[op](x), rtol=1e-5)


def test_not() -> None:
    made = read(lambda g: {"y": g.unary("y", feed(g, "x", "bool", (-1,)), "NOT")})
    assert run(made, x=torch.tensor([True, False]))["y"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ("SIGMOID", lambda x: 1 / (1 + np.exp(-x))),
        ("RELU", lambda x: np.maximum(x, 0)),
        ("TANH", np.tanh),
        ("GELU_TANH", lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activation(member: str, expected: Any) -> None:
    x = np.linspace(-4, 4, 33, dtype=np.float32)

    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_activation(feed(g, "x", "float32", (-1,)), getattr(g.trt.ActivationType, member))
        return {"y": layer.get_output(0)}

    np.testing.assert_allclose(run(read(build), x=torch.from_numpy(x))["y"].numpy(), expected(x), atol=1e-6)


def test_an_activation_that_is_not_executed_is_refused() -> None:
    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_activation(feed(g, "x", "float32", (-1,)), g.trt.ActivationType.SELU)
        layer.name = "odd"
        return {"y": layer.get_output(0)}

    with pytest.raises(UnsupportedLayerError, match=r"odd.*selu"):
        run(read(build), x=torch.zeros(1))


def test_cast_truncates_to_integers_and_rounds_to_16_bits_only_when_declared() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1,))
        return {
            "int": g.cast("int", x, "int32"),
            "wide": g.cast("wide", g.cast("half", x, "float16"), "float32"),
            "bool": g.cast("bool", x, "bool"),
        }

    x = torch.tensor([-1.7, 1.7, 0.0, 1 + 2**-12])
    exact, declared = run(read(build), x=x), run(read(build), "declared", x=x)
    assert exact["int"].tolist() == declared["int"].tolist() == [-1, 1, 0, 1]
    assert exact["bool"].tolist() == [True, True, False, True]
    assert torch.equal(exact["wide"], x)
    assert torch.equal(declared["wide"], x.half().float())
    assert not torch.equal(declared["wide"], x)


def test_select() -> None:
    def build(g: Any) -> dict[str, Any]:
        condition, a, b = (
            feed(g, "c", "bool", (-1, 1)),
            feed(g, "a", "float32", (1, 3)),
            feed(g, "b", "float32", (1, 1)),
        )
        return {"y": g.network.add_select(condition, a, b).get_output(0)}

    result = run(read(build), c=torch.tensor([[True], [False]]), a=torch.tensor([[1.0, 2, 3]]), b=torch.tensor([[9.0]]))
    assert result["y"].tolist() == [[1, 2, 3], [9, 9, 9]]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_one_hot_on_any_axis(axis: int) -> None:
    def build(g: Any) -> dict[str, Any]:
        values, depth = g.number("values", [2, 5], "float32"), g.number("depth", 4, "int32")
        return {"y": g.network.add_one_hot(feed(g, "i", "int32", (-1, 2)), values, depth, axis).get_output(0)}

    indices = torch.tensor([[0, 3], [1, 1], [2, 9]], dtype=torch.int32)  # 9 is outside: nothing is set
    inside = torch.nn.functional.one_hot(indices.clamp(max=3).long(), 4) * (indices < 4)[..., None]
    expected = (2 + 3 * inside.float()).movedim(-1, axis)
    assert torch.equal(run(read(build), i=indices)["y"], expected)


def test_fill_counts_from_its_inputs() -> None:
    def build(g: Any) -> dict[str, Any]:
        length = g.product("length", g.shape("shape", feed(g, "x", "float32", (-1,))), g.number("two", [2], "int64"))
        layer = g.network.add_fill((1,), g.trt.FillOperation.LINSPACE, g.trt.int32)
        layer.set_input(0, length)
        layer.set_input(1, g.number("from", 5, "int32"))
        layer.set_input(2, g.number("step", [3], "int32"))
        return {"y": layer.get_output(0)}

    result = run(read(build), x=torch.zeros(3))["y"]
    assert result.dtype == torch.int32
    assert result.tolist() == [5, 8, 11, 14, 17, 20]


def test_fill_counts_from_its_attributes() -> None:
    attributes = {"op": "linspace", "shape": [4], "alpha": 1.5, "beta": 0.5, "to": "float32"}
    node = Node(kind="fill", name="f", inputs=(), outputs=(TensorSpec("y", "float32", (4,)),), attributes=attributes)
    assert run(program([node], [], ["y"], {}))["y"].tolist() == [1.5, 2.0, 2.5, 3.0]


def test_a_random_fill_is_refused() -> None:
    attributes = {"op": "random_uniform", "shape": [4], "alpha": 0, "beta": 1, "to": "float32"}
    node = Node(
        kind="fill", name="noise", inputs=(), outputs=(TensorSpec("y", "float32", (4,)),), attributes=attributes
    )
    with pytest.raises(UnsupportedLayerError, match=r"noise.*random_uniform"):
        run(program([node], [], ["y"], {}))
