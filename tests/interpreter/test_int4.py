"""The INT4 kernels against float64 products, whatever the number of rows, columns and groups."""

import itertools
import shutil
from collections.abc import Iterator

import pytest
import torch

from pipeline.interpreter import native
from pipeline.interpreter.operations import int4


@pytest.fixture
def afresh() -> Iterator[None]:
    native.load_functions.cache_clear()
    yield
    native.load_functions.cache_clear()


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest) -> int4.Int4Kernel:
    if request.param == "torch":
        return int4.TORCH
    functions = native.load_functions()
    if functions is None:
        pytest.skip("no compiler, or no AVX-512 bf16")
    return int4._native(functions.int4_linear)


def draw(width: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width + columns)
    values = torch.randint(-8, 8, (width, columns), generator=generator, dtype=torch.int8)
    return values, (0.01 + torch.rand(width // group, columns, generator=generator)).bfloat16()


@pytest.mark.parametrize(("width", "columns", "group"), [(64, 16, 32), (256, 48, 64), (384, 16, 128), (512, 80, 256)])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_products(kernel: int4.Int4Kernel, width: int, columns: int, group: int, held: torch.dtype) -> None:
    values, scales = draw(width, columns, group)
    multiply, packed, factors = kernel.multiply(group, held), kernel.pack(values), kernel.scale(scales)
    wide = values.double() * scales.double().repeat_interleave(group, 0)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 32):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        result, expected = multiply(x, packed, factors), x.double() @ wide
        assert result.dtype is held and result.shape == (rows, columns)
        bound = 2**-8 * (x.double().abs() @ wide.abs())
        assert ((result.double() - expected).abs() <= bound).all()


def test_every_value_is_looked_up_right(kernel: int4.Int4Kernel) -> None:
    """One input at a time: each result is one weight, exactly."""
    values, scales = draw(64, 32, 32)
    multiply, packed = kernel.multiply(32, torch.float32), kernel.pack(values)
    ones = kernel.scale(torch.ones_like(scales))
    assert torch.equal(multiply(torch.eye(64).bfloat16(), packed, ones), values.float())


def test_parts_and_threads_change_nothing(kernel: int4.Int4Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not contiguous, and more threads than blocks of columns."""
    values, scales = draw(256, 32, 64)
    multiply, packed, factors = kernel.multiply(64, torch.bfloat16), kernel.pack(values), kernel.scale(scales)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = multiply(x[::2, :256].clone(), packed, factors)
    monkeypatch.setattr(int4, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(multiply(x[::2, :256], packed, factors), expected)


@pytest.mark.parametrize(("group", "columns"), list(itertools.product([16, 48, 64], [16, 24])))
def test_what_no_kernel_takes(group: int, columns: int) -> None:
    assert (int4.pick_int4_kernel(group, columns) is not None) == (group == 64 and columns == 16)


def test_without_a_compiler_torchs_kernel_runs(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert int4.pick_int4_kernel(64, 64) is int4.TORCH


def test_a_compiler_that_fails_is_as_none(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert int4.pick_int4_kernel(64, 64) is int4.TORCH
