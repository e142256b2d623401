"""What is rotated and what is not, side by side: in C and in torch's parts, against float64."""

import math
from typing import Any

import pytest
import torch

from pipeline.interpreter.numerics import Numerics
from pipeline.interpreter.operations import joined
from pipeline.interpreter.operations.site import Site
from pipeline.network.program import Node, TensorSpec
from tests.interpreter.test_rotation import rotated

HEADS, WIDTH, DIM, SIZE, BLOCKS, ROWS = 3, 10, 8, 4, 5, 6


def compile_kernel(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, *, interleaved: bool, native: bool, write: bool
) -> Any:
    monkeypatch.setattr(Numerics, "held", lambda *_: held)
    if not native:
        monkeypatch.setattr(joined, "load_library", lambda: None)
    else:
        assert joined.load_library() is not None, "no C compiler with OpenMP"
    shapes = {"left": (-1, HEADS, WIDTH), "right": (-1, HEADS, DIM), "turns": (-1, 1, -1)}
    last = {"rows": (-1,), "pool": (-1, HEADS, SIZE, WIDTH + DIM)} if write else {"factor": (1, 1, 1)}
    specs = tuple(TensorSpec(name, "float32", shape) for name, shape in (shapes | last).items())
    output = specs[-1] if write else TensorSpec("y", "float32", (-1, HEADS, WIDTH + DIM))
    node = Node(
        kind="write_joined" if write else "join_rotated",
        name="j",
        inputs=tuple(spec.name for spec in specs),
        outputs=(output,),
        attributes={"interleaved": interleaved, "dim": 0},
    )
    none: Any = None
    site = Site(node=node, inputs=specs, numerics=Numerics("fast"), constant=none, parts=none, prepare=none)
    return joined.compile_write_joined(site) if write else joined.compile_join_rotated(site)


def draw(held: torch.dtype, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Parts of wider rows; left with its heads outside, as a product of heads gives them."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(HEADS, ROWS, WIDTH, generator=generator).to(held).transpose(0, 1)
    right = torch.randn(ROWS, HEADS, DIM + 4, generator=generator).to(held)[..., 4:]
    angles = torch.randn(ROWS, 1, DIM // 2, generator=generator)
    c, s = angles.cos(), angles.sin()
    turns = torch.complex(c, s) if interleaved else (torch.cat((c, c), -1), torch.cat((-s, s), -1))
    return left, right, turns, angles


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_side_by_side(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, interleaved: bool, native: bool, threads: int
) -> None:
    monkeypatch.setattr(joined, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    left, right, turns, angles = draw(held, interleaved)
    factor = torch.tensor([[[0.37]]])
    expected = torch.cat((left.double() * factor, rotated(right, angles.double(), interleaved)), -1)
    y = compile_kernel(monkeypatch, held, interleaved=interleaved, native=native, write=False)(
        left, right, turns, factor
    )
    bound = 1e-6 if held is torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound)
    assert y.dtype is held and y.is_contiguous()


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_written_to_the_cache(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, interleaved: bool, native: bool
) -> None:
    left, right, turns, angles = draw(held, interleaved)
    pool = torch.zeros(BLOCKS, HEADS, SIZE, WIDTH + DIM, dtype=held)
    places = torch.randperm(BLOCKS * HEADS * SIZE, generator=torch.Generator().manual_seed(2))[: ROWS * HEADS]
    kernel = compile_kernel(monkeypatch, held, interleaved=interleaved, native=native, write=True)
    assert kernel(left, right, turns, (places, None), pool) is pool
    expected = torch.zeros(BLOCKS * HEADS * SIZE, WIDTH + DIM, dtype=torch.float64)
    expected[places] = torch.cat((left.double(), rotated(right, angles.double(), interleaved)), -1).flatten(0, 1)
    bound = 1e-6 if held is torch.float32 else 2**-8
    torch.testing.assert_close(pool.view_as(expected).double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("place", [-1, BLOCKS * HEADS * SIZE])
def test_places_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    left, right, turns, _ = draw(torch.float32, False)
    pool, places = torch.zeros(BLOCKS, HEADS, SIZE, WIDTH + DIM), torch.arange(ROWS * HEADS)
    places[-1] = place
    kernel = compile_kernel(monkeypatch, torch.float32, interleaved=False, native=True, write=True)
    with pytest.raises(IndexError, match="none of the 60 of the cache"):
        kernel(left, right, turns, (places, None), pool)
    assert not pool.any()


def test_rows_that_do_not_stay_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, turns, _ = draw(torch.float32, False)
    pool = torch.zeros(BLOCKS, HEADS, SIZE, WIDTH + DIM)
    kernel = compile_kernel(monkeypatch, torch.float32, interleaved=False, native=True, write=True)
    kernel(left, right, turns, (torch.arange(2 * HEADS), torch.tensor([0, 3])), pool)
    assert int(pool.any(-1).sum()) == 2 * HEADS


def test_nan_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, turns, _ = draw(torch.float32, True)
    kernel = compile_kernel(monkeypatch, torch.float32, interleaved=True, native=True, write=False)
    alone = kernel(left, right, turns)
    right[2, 1, 0] = math.nan
    y = kernel(left, right, turns)
    assert bool(y[2, 1].isnan().any()) and not y[2, 0].isnan().any()
    assert torch.equal(y[[0, 1, 3, 4, 5]], alone[[0, 1, 3, 4, 5]])
