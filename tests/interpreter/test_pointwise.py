"""The RMS norm and the gate in C against float64, and in the place of a network's own."""

from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter import native
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import pointwise
from tests.interpreter.networks import feed, read

WEIGHT = torch.linspace(0.5, 2, 64).bfloat16()


@pytest.fixture(scope="module")
def library() -> native.Library:
    found = native.load_library()
    assert found is not None, "no C compiler with OpenMP"
    return found


def call(library: native.Library, kernel: str, *arguments: int | None) -> None:
    assert library.lay_out([native.Call(kernel=kernel, arguments=arguments, outputs=None)]).run() is None


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    normal = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return (normal.double() * weight.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_rounds_where_torch_does(library: native.Library, rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(rows + 1, width, generator=generator)).to(dtype)
    weight = (1 + torch.randn(width, generator=generator)).to(dtype)
    y = torch.full((rows + 1, width), 7.0, dtype=dtype)
    eps = torch.tensor(1e-3)
    memory = (x.data_ptr(), None, None, weight.data_ptr(), y.data_ptr(), eps.data_ptr())
    call(library, "rms_norm", dtype is torch.bfloat16, *memory, rows, width, width)
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


def test_one_thread_and_several_are_alike(library: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows do not follow one another."""
    interpreter = Interpreter(read(network), mode="fast")
    x = torch.randn(10, 128, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :64]
    alone = interpreter.run({"x": x})["y"]
    torch.testing.assert_close(alone.float(), reference(x, WEIGHT, 1e-3).float(), rtol=2**-7, atol=0)
    share(monkeypatch)
    assert torch.equal(Interpreter(read(network), mode="fast").run({"x": x})["y"], alone)


def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads for any number of values."""
    monkeypatch.setattr(pointwise, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def stream(g: Any) -> dict[str, Any]:
    """A residual stream: each sum is normed, and added to."""
    x = g.cast("x16", feed(g, "x", "float32", (-1, 64)), "bfloat16")
    for layer in range(2):
        x = g.sum(f"sum{layer}", x, feed(g, f"added{layer}", "bfloat16", (-1, 64)))
        wide = g.cast(f"wide{layer}", x, "float32")
        mean = g.reduce(f"mean{layer}", g.product(f"square{layer}", wide, wide), "AVG", 1, keep=True)
        variance = g.sum(f"variance{layer}", mean, g.number(f"eps{layer}", [[1e-3]], "float32"))
        ratio = g.elementwise(f"ratio{layer}", wide, g.unary(f"root{layer}", variance, "SQRT"), "DIV")
        weight = g.constant(f"weight{layer}", RawTensor.from_torch(WEIGHT[None]))
        normed = g.product(f"y{layer}", g.cast(f"normal{layer}", ratio, "bfloat16"), weight)
    return {"y": normed, "stream": x}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("native_too", [True, False])
def test_a_sum_and_its_norm(shared: bool, native_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shared:
        share(monkeypatch)
    if not native_too:
        monkeypatch.setattr(pointwise, "load_library", lambda: None)
    program, generator = read(stream), torch.Generator().manual_seed(0)
    x, *added = (torch.randn(5, 128, generator=generator)[:, :64] for _ in range(3))
    found = Interpreter(program, mode="fast").run({"x": x, "added0": added[0], "added1": added[1]})
    held = found["stream"].dtype
    total = (x.to(held) + added[0].to(held)) + added[1].to(held)
    assert torch.equal(found["stream"], total)
    torch.testing.assert_close(
        found["y"].double(), reference(total, WEIGHT.to(held), 1e-3).double(), rtol=2**-7, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 17, 64])
def test_the_gate_over_columns_side_by_side(library: native.Library, width: int, dtype: torch.dtype) -> None:
    both = (20 * torch.randn(3, 2 * width + 5, generator=torch.Generator().manual_seed(width))).to(dtype)
    both[0, 0], both[1, width] = torch.nan, torch.inf
    g, u = both[:, :width], both[:, width : 2 * width]
    y = torch.full((4, width), 7.0, dtype=dtype)
    step = both.stride(0)
    memory = (g.data_ptr(), u.data_ptr(), y.data_ptr())
    call(library, "gate", dtype is torch.bfloat16, *memory, 3, width, step, step)
    expected = ((g.double() * torch.sigmoid(g.double())).to(dtype).double() * u.double()).to(dtype)
    assert (y[3] == 7).all()  # nothing beyond the rows
    tolerance = 2**-7 if dtype is torch.bfloat16 else 2**-20
    torch.testing.assert_close(y[:3].double(), expected.double(), rtol=tolerance, atol=1e-30, equal_nan=True)
