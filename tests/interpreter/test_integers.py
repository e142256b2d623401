"""Shape arithmetic that runs on Python integers must give what the same layers give on tensors."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.interpreter import Interpreter
from tests.interpreter.networks import feed, read, run


def sizes(g: Any) -> Any:
    return g.shape("sizes", feed(g, "x", "float32", (-1, -1, 4)))


def evaluate(build: Any, x: torch.Tensor) -> list[int]:
    result = run(read(build), x=x)["y"]
    assert result.dtype == torch.int64 and result.dim() == 1
    return result.tolist()


@pytest.mark.parametrize("op", ["SUM", "SUB", "PROD", "DIV", "FLOOR_DIV", "MAX", "MIN"])
@pytest.mark.parametrize("other", [[-3, 2, 3], [5]])
def test_elementwise(op: str, other: list[int]) -> None:
    def build(g: Any) -> dict[str, Any]:
        return {"y": g.elementwise("y", sizes(g), g.number("other", other, "int64"), op)}

    a, b = np.array([7, 3, 4]), np.array(other)
    functions: dict[str, Any] = {
        "SUM": np.add,
        "SUB": np.subtract,
        "PROD": np.multiply,
        "DIV": lambda a, b: np.trunc(a / b),
        "FLOOR_DIV": np.floor_divide,
        "MAX": np.maximum,
        "MIN": np.minimum,
    }
    assert evaluate(build, torch.zeros(7, 3, 4)) == functions[op](a, b).tolist()


def test_gather_slice_concatenate_reduce_reshape_and_cast() -> None:
    def build(g: Any) -> dict[str, Any]:
        s = sizes(g)
        scalar = g.gather("second", s, g.number("index", -2, "int32"))
        first = g.slice("first", s, 0, 0, 2)
        total = g.reduce("total", s, "PROD", 0, keep=True)
        narrow = g.cast("narrow", g.cast("int32", g.reshape("column", scalar, (1,)), "int32"), "int64")
        backwards = g.network.add_slice(s, (2,), (3,), (-1,)).get_output(0)
        return {"y": g.concatenate("all", [narrow, first, total, backwards], 0)}

    assert evaluate(build, torch.zeros(7, 3, 4)) == [3, 7, 3, 84, 4, 3, 7]


def test_integers_meet_tensors_and_come_back() -> None:
    def build(g: Any) -> dict[str, Any]:
        count = g.cast("count", g.slice("rows", sizes(g), 0, 0, 1), "int32")
        given = g.sum("given", count, feed(g, "more", "int32", (1,)))  # a value that only the feed knows
        layer = g.network.add_fill((1,), g.trt.FillOperation.LINSPACE, g.trt.int32)
        layer.set_input(0, g.cast("length", given, "int64"))
        layer.set_input(1, g.number("from", 0, "int32"))
        layer.set_input(2, g.number("step", [1], "int32"))
        return {"y": layer.get_output(0)}

    result = run(read(build), x=torch.zeros(2, 1, 4), more=torch.tensor([3], dtype=torch.int32))["y"]
    assert result.tolist() == [0, 1, 2, 3, 4]


def test_shapes_cost_no_tensor() -> None:
    """The chain from a shape to a reshape stays on integers: no step makes a tensor of it."""

    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, -1, 4))
        s = g.shape("sizes", x)
        rows = g.product("rows", g.slice("a", s, 0, 0, 1), g.slice("b", s, 0, 1, 1))
        layer = g.network.add_shuffle(x)
        layer.set_input(1, g.concatenate("dims", [rows, g.number("four", [4], "int64")], 0))
        layer.name = "reshape"
        return {"y": layer.get_output(0)}

    interpreter = Interpreter(read(build), mode="exact")
    made: list[str] = []
    original = torch.tensor

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append("tensor")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", spy)
        result = interpreter.run({"x": torch.zeros(2, 3, 4)})["y"]
    assert result.shape == (6, 4) and not made
