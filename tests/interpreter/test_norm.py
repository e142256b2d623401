"""The RMS norm in C against float64, and in the place of a network's own."""

from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter import native
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import fused
from tests.interpreter.networks import feed, read

WEIGHT = torch.linspace(0.5, 2, 64).bfloat16()


@pytest.fixture(scope="module")
def functions() -> native.Functions:
    found = native.load_functions()
    assert found is not None, "no C compiler with OpenMP"
    return found


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    normal = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return (normal.double() * weight.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_rounds_where_torch_does(functions: native.Functions, rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(rows + 1, width, generator=generator)).to(dtype)
    weight = (1 + torch.randn(width, generator=generator)).to(dtype)
    y = torch.full((rows + 1, width), 7.0, dtype=dtype)
    functions.rms_norm(dtype is torch.bfloat16, x.data_ptr(), weight.data_ptr(), y.data_ptr(), 1e-3, rows, width)
    expected = reference(x[:rows], weight, 1e-3)
    assert (y[rows] == 7).all()  # nothing beyond the rows
    if dtype is torch.float32:
        torch.testing.assert_close(y[:rows], expected, rtol=2**-20, atol=0)
        return
    torch.testing.assert_close(
        y[:rows].float(), expected.float(), rtol=2**-7, atol=0
    )  # a rounding may fall the other way
    assert (y[:rows] == expected).float().mean() > 0.98


def network(g: Any) -> dict[str, Any]:
    x = feed(g, "x", "bfloat16", (-1, 64))
    wide = g.cast("wide", x, "float32")
    mean = g.reduce("mean", g.product("square", wide, wide), "AVG", 1, keep=True)
    root = g.unary("root", g.sum("variance", mean, g.number("eps", [[1e-3]], "float32")), "SQRT")
    ratio = g.cast("normal", g.elementwise("ratio", wide, root, "DIV"), "bfloat16")
    return {"y": g.product("y", ratio, g.constant("weight", RawTensor.from_torch(WEIGHT[None])))}


def test_few_rows_and_many_are_alike(functions: native.Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side of the number of values, also where rows do not follow one another."""
    interpreter = Interpreter(read(network), mode="fast")
    x = torch.randn(10, 128, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :64]
    few = interpreter.run({"x": x})["y"]
    monkeypatch.setattr(fused, "MOST_NORMED", 0)
    many = interpreter.run({"x": x})["y"]
    for found in (few, many):
        torch.testing.assert_close(found.float(), reference(x, WEIGHT, 1e-3).float(), rtol=2**-7, atol=0)
