from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Mode, Numerics
from pipeline.interpreter.operations import packed
from pipeline.network.program import Program
from tests.interpreter.networks import feed, read

IN, OUT = 256, 64
FAST = Numerics("fast").held("bfloat16")
UNPACKED: Mode = "declared" if FAST is torch.bfloat16 else "exact"  # what holds 16-bit weights as fast mode does


def assert_same(fast: torch.Tensor, unpacked: torch.Tensor) -> None:
    """To the bit; exact mode adds in another order."""
    tolerance = 0.0 if FAST is torch.bfloat16 else 1e-5
    torch.testing.assert_close(fast, unpacked, rtol=tolerance, atol=tolerance)


def random_int4(group: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (IN, columns), generator=generator, dtype=torch.int8)
    scales = (0.01 + 0.01 * torch.rand(IN // group, columns, generator=generator)).to(dtype)
    return q, scales


def network(q: torch.Tensor, scales: torch.Tensor, dtype: str) -> Program:
    nibbles = q.reshape(-1, 2).numpy().astype(np.uint8) & 15
    stored = RawTensor("I8", (IN, q.shape[1] // 2), nibbles[:, 0] | nibbles[:, 1] << 4)

    def build(g: Any) -> dict[str, Any]:
        weight = g.dequantize("w", g.int4("q", stored), g.constant("scales", RawTensor.from_torch(scales)))
        return {"y": g.matmul("y", feed(g, "x", dtype, (-1, IN)), weight)}

    return read(build, dtype)


def run(program: Program, mode: Any, x: torch.Tensor) -> torch.Tensor:
    return Interpreter(program, mode=mode).run({"x": x})["y"]


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What the processor is fast in, as the kernels are told."""
    monkeypatch.setattr(packed, "multiplied_as", lambda _: request.param)
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, wide: torch.dtype) -> packed.PackedKernel:
    if request.param == "torch":
        monkeypatch.setattr(packed, "load_library", lambda: None)
    found = packed.pick_kernel("int4", 64, OUT)
    assert found is not None and found.name == request.param, "no C compiler with OpenMP"
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_fast_int4_is_within_bf16_roundings_for_few_rows_and_as_declared_for_many(
    dtype: str, group: int, kernel: packed.PackedKernel
) -> None:
    held = getattr(torch, dtype)
    q, scales = random_int4(group, OUT, held)
    program = network(q, scales, dtype)
    x = torch.randn(33, IN, generator=torch.Generator().manual_seed(1)).to(held)
    is_many = kernel.most_rows is not None
    if dtype == "bfloat16" and is_many:
        assert_same(run(program, "fast", x), run(program, UNPACKED, x))
    fast_bytes, declared_bytes = (Interpreter(program, mode=mode).prepared_bytes for mode in ("fast", "declared"))
    packed_bytes = q.numel() / 2 + q.numel() / group * 4
    assert declared_bytes >= q.numel() * (2 if dtype == "bfloat16" else 4)  # declared keeps fp16 weights in fp32
    if is_many:
        assert fast_bytes > q.numel() * 2 + q.numel() / 2  # a copy for many rows, and the kernel's own weights
    else:
        assert fast_bytes <= packed_bytes + 4096
    wide = q.double() * scales.double().repeat_interleave(group, 0)
    for rows in (x, x[:5]):
        fast, exact = run(program, "fast", rows), rows.double() @ wide
        # Input, scale and weight are each rounded to bf16 at most (2^-9, relative), independently: far below their sum.
        # In fp32 nothing is, except by torch's kernel; in C inputs of few rows are to 16 bits of the largest of 128,
        # of many to 8 bits of the largest of 32, which is below 4 times their mean.
        if FAST is torch.bfloat16:
            share = 3 * 2**-9
        elif kernel.name == "native":
            share = 4 / 254 if rows is x else 2**-12
        else:
            share = 2**-12 if rows is x else 3 * 2**-9
        bound = share * (rows.double().abs() @ wide.abs())
        assert fast.dtype == FAST
        assert ((fast.double() - exact).abs() <= bound).all()
        assert (fast.double() - exact).abs().mean() < bound.mean() / 8


def test_what_the_kernel_alone_multiplies_is_never_dequantized(wide: torch.dtype) -> None:
    """Not kept, and not made at each step, also where there is no room to keep it."""
    q, scales = random_int4(64, 2048, torch.bfloat16)
    program = network(q, scales, "bfloat16")
    interpreter = Interpreter(program, mode="fast", resident_bytes=q.numel() + q.numel() // 8)
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = interpreter.run({"x": x})["y"]
    expected = x.double() @ (q.double() * scales.double().repeat_interleave(64, 0))
    assert ((result.double() - expected).abs() <= 2**-7 * expected.abs() + 1e-3).all()
    steps = [layer for plan in interpreter._plans.values() for layer in plan.layers]
    assert ("w" in steps) == (wide is torch.bfloat16)


@pytest.mark.parametrize(("group", "columns"), [(16, OUT), (64, OUT + 8)])
def test_what_the_int4_kernel_does_not_take_runs_as_declared(group: int, columns: int) -> None:
    q, scales = random_int4(group, columns, torch.bfloat16)
    program = network(q, scales, "bfloat16")
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_same(run(program, "fast", x), run(program, UNPACKED, x))


def test_fast_without_room_for_weights_runs_as_declared() -> None:
    q, scales = random_int4(64, 2048, torch.bfloat16)
    program = network(q, scales, "bfloat16")
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    tight, roomy = (Interpreter(program, mode=mode, resident_bytes=0) for mode in ("fast", UNPACKED))
    assert_same(tight.run({"x": x})["y"], roomy.run({"x": x})["y"])
    assert tight.prepared_bytes < q.numel() / 2


def int8_network(count: int, dtype: str) -> tuple[Program, torch.Tensor]:
    """`count` linears of one input, and the dequantized weights [in, count * out] side by side."""
    generator, wide = torch.Generator().manual_seed(0), []
    stored = []
    for _ in range(count):
        q = torch.randint(-127, 128, (OUT, IN), generator=generator, dtype=torch.int8)
        scales = 0.01 + 0.01 * torch.rand(OUT, generator=generator)
        stored.append((q, scales))
        wide.append(q.double() * scales.double()[:, None])

    def build(g: Any) -> dict[str, Any]:
        x, made = feed(g, "x", dtype, (-1, IN)), {}
        for i, (q, scales) in enumerate(stored):
            numbers, factors = (g.constant(f"{n}{i}", RawTensor.from_torch(t)) for n, t in (("q", q), ("s", scales)))
            weight = g.dequantize_as_model(f"w{i}", numbers, factors, axis=0)
            made[f"y{i}"] = g.matmul(f"y{i}", x, weight, transpose=True)
        return made

    return read(build, dtype), torch.cat(wide).T


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 2])
def test_fast_int8_is_nearer_than_declared_for_few_rows_and_as_declared_for_many(
    dtype: str, count: int, wide: torch.dtype
) -> None:
    kernel = packed.pick_kernel("int8", IN, OUT)
    assert kernel is not None, "no C compiler with OpenMP"
    held = getattr(torch, dtype)
    program, expected_weight = int8_network(count, dtype)
    x = torch.randn(9, IN, generator=torch.Generator().manual_seed(1)).to(held)

    def run(mode: Any, rows: torch.Tensor) -> torch.Tensor:
        found = Interpreter(program, mode=mode).run({"x": rows})
        return torch.cat([found[f"y{i}"] for i in range(count)], dim=1)

    if dtype == "bfloat16" and kernel.most_rows is not None:
        assert_same(run("fast", x), run(UNPACKED, x))
    few = x[:5]
    fast, expected = run("fast", few), few.double() @ expected_weight
    assert fast.dtype is FAST
    if dtype == "bfloat16":  # whose input is not rounded; declared rounds each weight
        assert ((fast.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()
        assert not torch.equal(fast, run("declared", few))
    assert ((fast.double() - expected).abs() <= 3 * 2**-9 * (few.double().abs() @ expected_weight.abs())).all()
    exact = run("exact", few)
    assert (exact.double() - expected).abs().max() < 1e-3 and not torch.equal(exact, fast.float())
