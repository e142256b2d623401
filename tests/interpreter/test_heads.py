"""Products of heads in C against float64: types, strides, sizes, threads."""

import math
from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter import native
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import heads
from tests.interpreter.networks import feed, read

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["native", "portable"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.load_library(*(["-DPORTABLE"] if request.param == "portable" else []))
    assert found is not None, "no C compiler with OpenMP"
    monkeypatch.setattr(heads, "load_library", lambda: found)


def draw(count: int, width: int, out: int, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [count, width, out], some of them subnormal in 16 bits, and packed."""
    weights = torch.randn(count, width, out, generator=torch.Generator().manual_seed(width)) / width**0.5
    weights[:, 0] *= 2**-16
    weights = weights.to(stored)
    return weights.double(), weights.reshape(count, width, out // 16, 16).transpose(1, 2).contiguous()


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width", "out"), [(1, 7, 16), (3, 40, 48), (5, 128, 32)])
def test_products(library: None, stored: torch.dtype, held: torch.dtype, count: int, width: int, out: int) -> None:
    weights, packed = draw(count, width, out, stored)
    multiply = heads.native_heads(packed, 3, held)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 33):
        wide = torch.randn(rows, count, width + 5, generator=torch.Generator().manual_seed(rows)).to(held)
        x = wide[..., 5:].transpose(0, 1)  # as the heads of a row lie
        y = multiply(x, None)
        assert y.shape == (count, rows, out) and y.transpose(0, 1).is_contiguous() and y.dtype is held
        bound = 4e-6 if held is torch.float32 else 2**-8
        torch.testing.assert_close(y.double(), x.double() @ weights, rtol=bound, atol=bound)


def test_one_matrix_and_rows_for_all_heads(library: None) -> None:
    weights, packed = draw(3, 24, 32, torch.bfloat16)
    x = torch.randn(5, 24)
    flat = heads.native_heads(packed[:1], 2, torch.float32)(x)
    torch.testing.assert_close(flat.double(), x.double() @ weights[0], rtol=1e-6, atol=1e-6)
    every = heads.native_heads(packed, 3, torch.float32)(x[None])
    torch.testing.assert_close(every.double(), x.double() @ weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(library: None, value: float) -> None:
    _, packed = draw(2, 24, 32, torch.float16)
    x = torch.randn(2, 9, 24)
    multiply = heads.native_heads(packed, 3, torch.float32)
    alone = multiply(x).clone()
    x[0, 4, 3] = value
    y = multiply(x)
    assert not y[0, 4].isfinite().any()
    y[0, 4] = alone[0, 4]
    assert torch.equal(y, alone)


def test_threads_change_nothing(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = draw(5, 24, 48, torch.bfloat16)
    x, multiply = torch.randn(5, 9, 24), heads.native_heads(packed, 3, torch.float32)
    alone = multiply(x)
    monkeypatch.setattr(heads, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(multiply(x), alone)


def test_rows_of_another_width_are_refused(library: None) -> None:
    _, packed = draw(2, 24, 32, torch.float16)
    for shape in ((2, 9, 23), (3, 9, 24), (9, 24)):
        with pytest.raises((ValueError, IndexError)):
            heads.native_heads(packed, 3, torch.float32)(torch.randn(shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("room", [None, 0])
def test_in_a_network(dtype: str, transpose: bool, room: int | None) -> None:
    shape = (3, 32, 24) if transpose else (3, 24, 32)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 5

    def build(g: Any) -> dict[str, Any]:
        x = g.reshape("heads", feed(g, "x", dtype, (-1, 3, 24)), first=(1, 0, 2))
        constant = g.constant("w", RawTensor.from_torch(weights.to(getattr(torch, dtype))))
        return {
            "y": g.reshape("merged", g.matmul("product", x, constant, transpose=transpose), (-1, 96), first=(1, 0, 2))
        }

    program, x = read(build, dtype), torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(2))
    exact = Interpreter(program, mode="exact").run({"x": x.to(getattr(torch, dtype)).float()})["y"]
    interpreter = Interpreter(program, mode="fast", resident_bytes=room)
    held = interpreter.numerics.held(dtype)
    y = interpreter.run({"x": x.to(getattr(torch, dtype)).to(held)})["y"]
    bound = 1e-6 if held is torch.float32 else 2**-6
    torch.testing.assert_close(y.float(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("value", "stored"),
    [(1 / 3, torch.float32), (1 + 2**-7, torch.bfloat16), (1 + 2**-9, torch.float16), (torch.inf, torch.float32)],
)
def test_weights_are_stored_in_what_says_the_same(value: float, stored: torch.dtype) -> None:
    assert heads.narrowest(torch.tensor([1.0, value])) is stored
