from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.operations import int4
from pipeline.network.program import Program
from tests.interpreter.networks import feed, read

IN, OUT = 256, 64


def random_int4(group: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (IN, columns), generator=generator, dtype=torch.int8)
    scales = (0.01 + 0.01 * torch.rand(IN // group, columns, generator=generator)).to(dtype)
    return q, scales


def network(q: torch.Tensor, scales: torch.Tensor, dtype: str) -> Program:
    nibbles = q.reshape(-1, 2).numpy().astype(np.uint8) & 15
    packed = RawTensor("I8", (IN, q.shape[1] // 2), nibbles[:, 0] | nibbles[:, 1] << 4)

    def build(g: Any) -> dict[str, Any]:
        weight = g.dequantize("w", g.int4("q", packed), g.constant("scales", RawTensor.from_torch(scales)))
        return {"y": g.matmul("y", feed(g, "x", dtype, (-1, IN)), weight)}

    return read(build, dtype)


def run(program: Program, mode: Any, x: torch.Tensor) -> torch.Tensor:
    return Interpreter(program, mode=mode).run({"x": x})["y"]


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int4.Int4Kernel:
    if request.param == "torch":
        monkeypatch.setattr(int4, "load_functions", lambda: None)
    found = int4.pick_int4_kernel(64, OUT)
    if found is None or found.name != request.param:
        pytest.skip("no compiler, or no AVX-512 bf16")
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_fast_int4_is_within_bf16_roundings_for_few_rows_and_as_declared_for_many(
    dtype: str, group: int, kernel: int4.Int4Kernel
) -> None:
    held = getattr(torch, dtype)
    q, scales = random_int4(group, OUT, held)
    program = network(q, scales, dtype)
    x = torch.randn(kernel.most_rows + 1, IN, generator=torch.Generator().manual_seed(1)).to(held)
    if dtype == "bfloat16":
        assert torch.equal(run(program, "fast", x), run(program, "declared", x))
    sizes = [Interpreter(program, mode=mode).prepared_bytes for mode in ("fast", "declared")]
    copy = q.numel() * (2 if dtype == "bfloat16" else 4)  # declared keeps fp16 weights in fp32
    assert sizes[0] > q.numel() * 2 + q.numel() / 2 and sizes[1] >= copy  # the kernel's own weights are there
    wide = q.double() * scales.double().repeat_interleave(group, 0)
    for rows in (x, x[: kernel.most_rows]):
        fast, exact = run(program, "fast", rows), rows.double() @ wide
        # Input, scale and weight are each rounded to bf16 (2^-9 at most, relative), independently: far below their sum.
        bound = 3 * 2**-9 * (rows.double().abs() @ wide.abs())
        assert fast.dtype == torch.bfloat16
        assert ((fast.double() - exact).abs() <= bound).all()
        assert (fast.double() - exact).abs().mean() < bound.mean() / 8


@pytest.mark.parametrize(("group", "columns"), [(16, OUT), (64, OUT + 8)])
def test_what_the_int4_kernel_does_not_take_runs_as_declared(group: int, columns: int) -> None:
    q, scales = random_int4(group, columns, torch.bfloat16)
    program = network(q, scales, "bfloat16")
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(run(program, "fast", x), run(program, "declared", x))


def test_fast_without_room_for_weights_runs_as_declared() -> None:
    q, scales = random_int4(64, 2048, torch.bfloat16)
    program = network(q, scales, "bfloat16")
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    tight, roomy = (Interpreter(program, mode=mode, resident_bytes=0) for mode in ("fast", "declared"))
    assert torch.equal(tight.run({"x": x})["y"], roomy.run({"x": x})["y"])
    assert tight.prepared_bytes < q.numel() / 2
