"""Rotation into the cache: in C and in torch's parts, against the rotation written out in float64."""

from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Numerics
from pipeline.interpreter.operations import rotation
from pipeline.interpreter.operations.site import Site
from pipeline.network.program import Node, TensorSpec
from tests.interpreter.networks import feed, read

HEADS, KV_HEADS, WIDTH, SIZE, BLOCKS = 4, 2, 16, 8, 5
ROWS = 3


def compile_kernel(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, *, dim: int, interleaved: bool, others: int, native: bool
) -> Any:
    monkeypatch.setattr(Numerics, "held", lambda *_: held)
    if not native:
        monkeypatch.setattr(rotation, "load_library", lambda: None)
    else:
        assert rotation.load_library() is not None, "no C compiler with OpenMP"
    all_heads = HEADS + 2 * KV_HEADS + others
    attributes = {
        "counts": [HEADS, KV_HEADS],
        "shape": [all_heads, WIDTH],
        "dim": dim,
        "interleaved": interleaved,
    }
    pool = (-1, KV_HEADS, SIZE, WIDTH)
    inputs = [TensorSpec("x", "float32", (-1, all_heads * WIDTH)), TensorSpec("turns", "float32", (-1, -1, -1))]
    pools = [TensorSpec(name, "float32", pool) for name in ("keys", "values")]
    specs = (*inputs, TensorSpec("rows", "int64", (-1,)), *pools)
    outputs = (TensorSpec("q", "float32", (-1, HEADS, WIDTH)), TensorSpec("k", "float32", pool), pools[1])
    names = tuple(spec.name for spec in specs)
    node = Node(kind="rotate_into_cache", name="r", inputs=names, outputs=outputs, attributes=attributes)
    none: Any = None
    site = Site(node=node, inputs=specs, numerics=Numerics("fast"), constant=none, parts=none, prepare=none)
    return rotation.compile_rotate_into_cache(site)


def rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[rows, heads, D] by angles [rows, heads, dim / 2], in float64."""
    half = angles.shape[-1]
    x, y = x.double(), x.double().clone()
    a, b = (
        (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    first, second = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    if interleaved:
        y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = first, second
    else:
        y[..., :half], y[..., half : 2 * half] = first, second
    return y


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dim", "others"), [(0, 0), (8, 0), (0, 1)])
@pytest.mark.parametrize("inside", [True, False])
def test_queries_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    held: torch.dtype,
    interleaved: bool,
    dim: int,
    others: int,
    inside: bool,
) -> None:
    kernel = compile_kernel(monkeypatch, held, dim=dim, interleaved=interleaved, others=others, native=native)
    monkeypatch.setattr(rotation, "FEWEST_SHARED", 0)
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(ROWS, HEADS + 2 * KV_HEADS + others, WIDTH, generator=generator).to(held)
    angles = torch.rand(ROWS, HEADS + KV_HEADS, (dim or WIDTH) // 2, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    turns: Any = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    if interleaved:
        turns = torch.complex(cos, sin)
    blocks, offsets = torch.tensor([3, 1, 3]), torch.tensor([7, 0, 2])
    kept = None if inside else torch.tensor([0, 2])  # the second row falls outside its block
    chosen = torch.arange(ROWS) if kept is None else kept
    heads = torch.arange(KV_HEADS) * SIZE
    places = ((blocks * KV_HEADS * SIZE + offsets)[chosen, None] + heads).reshape(-1)
    keys, values = (torch.full((BLOCKS, KV_HEADS, SIZE, WIDTH), 7.0, dtype=held) for _ in range(2))
    q, k, v = kernel(x.flatten(1), turns, (places, kept), keys, values)
    assert k is keys and v is values and q.dtype is held
    tolerance = 2**-7 if held is torch.bfloat16 else 2e-6
    turned = rotated(x[:, : HEADS + KV_HEADS], angles.double(), interleaved)
    torch.testing.assert_close(q.double(), turned[:, :HEADS], rtol=tolerance, atol=tolerance)
    expected_keys, expected_values = (torch.full_like(pool, 7.0).double() for pool in (keys, values))
    for row in chosen.tolist():
        expected_keys[blocks[row], :, offsets[row]] = turned[row, HEADS:]
        expected_values[blocks[row], :, offsets[row]] = x[row, HEADS + KV_HEADS : HEADS + 2 * KV_HEADS].double()
    torch.testing.assert_close(keys.double(), expected_keys, rtol=tolerance, atol=tolerance)
    assert torch.equal(values.double(), expected_values)


@pytest.mark.parametrize("place", [-1, BLOCKS * KV_HEADS * SIZE])
def test_a_place_that_is_none_is_refused_and_nothing_written(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    kernel = compile_kernel(monkeypatch, torch.float32, dim=0, interleaved=False, others=0, native=True)
    x, tables = torch.randn(1, (HEADS + 2 * KV_HEADS) * WIDTH), torch.ones(1, HEADS + KV_HEADS, WIDTH)
    keys, values = (torch.zeros(BLOCKS, KV_HEADS, SIZE, WIDTH) for _ in range(2))
    with pytest.raises(IndexError, match="none of the 80"):
        kernel(x, (tables, tables), (torch.tensor([0, place]), None), keys, values)
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_scaled_twice_is_scaled_by_both(joined: bool) -> None:
    def network(g: Any) -> dict[str, Any]:
        x, positions = feed(g, "x", "float32", (-1, 2, 8)), feed(g, "positions", "int64", (-1, 1))
        angles = torch.arange(20).reshape(5, 4) / 7
        tables = tuple(
            g.constant(name, RawTensor.from_torch(t)) for name, t in (("cos", angles.cos()), ("sin", angles.sin()))
        )
        turned = g.rotate("rotary", g.reshape("column", x, (-1, 2, 1, 8)), tables, positions, interleaved=False)
        y = g.product("once", g.reshape("rotated", turned, (-1, 2, 8)), g.number("two", [[[2.0]]], "float32"))
        if joined:
            y = g.concatenate("both", [x, y], 2)
        return {"y": g.product("twice", y, g.number("three", [[[3.0]]], "float32"))}

    program = read(network)
    inputs = {
        "x": torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)),
        "positions": torch.arange(5)[:, None],
    }
    fast, exact = (Interpreter(program, mode=mode).run(inputs)["y"] for mode in ("fast", "exact"))
    torch.testing.assert_close(fast.float(), exact, rtol=1e-5, atol=1e-5 if fast.dtype is torch.float32 else 2**-5)
