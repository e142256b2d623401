"""The INT4 and INT8 kernels against float64 products, whatever the number of rows, columns and groups."""

import itertools
import shutil
from collections.abc import Iterator

import pytest
import torch

from pipeline.interpreter import native
from pipeline.interpreter.operations import packed as kernels


@pytest.fixture
def afresh() -> Iterator[None]:
    native.load_library.cache_clear()
    yield
    native.load_library.cache_clear()


def load(variant: str) -> native.Library:
    """In C, with this processor's instructions or with none that only x86 has."""
    library = native.load_library(*(["-DPORTABLE"] if variant == "portable" else []))
    assert library is not None, "no C compiler with OpenMP"
    return library


@pytest.fixture(params=["torch", "native", "portable"])
def kernel(request: pytest.FixtureRequest) -> kernels.PackedKernel:
    return kernels.TORCH if request.param == "torch" else kernels.native_kernel("int4", load(request.param))


@pytest.fixture(params=["native", "portable"])
def native_kernel(request: pytest.FixtureRequest) -> kernels.PackedKernel:
    return kernels.native_kernel("int4", load(request.param))


def rounding(x: torch.Tensor, wide: torch.Tensor, bits: int = 16) -> torch.Tensor:
    """What products in C may be off by: half a unit of each input, of 16 bits 2^-15 of the largest of 128 at most, of 8
    bits 1/254 of the largest of 32, times each weight, and fp32's sums."""
    part, share = {16: (128, 2**-15), 8: (32, 1.0001 / 254)}[bits]
    parts = x.double().abs().split(part, dim=1)
    most = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in parts], dim=1)
    return (share * most + 2**-21 * x.double().abs()) @ wide.abs()


def draw(width: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width + columns)
    values = torch.randint(-8, 8, (width, columns), generator=generator, dtype=torch.int8)
    return values, (0.01 + torch.rand(width // group, columns, generator=generator)).bfloat16()


@pytest.mark.parametrize(("width", "columns", "group"), [(64, 16, 32), (256, 48, 64), (384, 16, 128), (512, 80, 256)])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_products(kernel: kernels.PackedKernel, width: int, columns: int, group: int, held: torch.dtype) -> None:
    values, scales = draw(width, columns, group)
    multiply, packed, factors = kernel.multiply(group, held), kernel.pack(values), kernel.scale(scales)
    wide = values.double() * scales.double().repeat_interleave(group, 0)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 32):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        result, expected = multiply(x, packed, factors), x.double() @ wide
        assert result.dtype is held and result.shape == (rows, columns)
        bound = 2**-8 * (x.double().abs() @ wide.abs())
        assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("width", "columns", "group"), [(64, 16, 32), (256, 48, 64), (384, 16, 128), (512, 80, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rows_are_rounded_to_8_bits_of_32(
    native_kernel: kernels.PackedKernel, width: int, columns: int, group: int, dtype: torch.dtype
) -> None:
    """Blocks of very different sizes, full of the largest and smallest weights beside others: nothing overflows."""
    values, scales = draw(width, columns, group)
    values[:, 0], values[:, 1] = -8, 7
    multiply, packed, factors = (
        native_kernel.multiply(group, torch.float32),
        native_kernel.pack(values),
        native_kernel.scale(scales),
    )
    wide = values.double() * scales.double().repeat_interleave(group, 0)
    for rows in range(kernels.FEWEST_SHORT - 1, kernels.FEWEST_SHORT + 8):
        generator = torch.Generator().manual_seed(rows)
        sizes = torch.exp2(torch.randint(-60, 60, (rows, width // 32, 1), generator=generator))
        x = (torch.randn(rows, width // 32, 32, generator=generator) * sizes).view(rows, width).to(dtype)
        x[0], x[1] = 3.0, -0.1  # every input the largest of its block
        error = (multiply(x, packed, factors).double() - x.double() @ wide).abs()
        few = rows < kernels.FEWEST_SHORT
        assert (error <= rounding(x, wide, 16 if few else 8)).all()
        assert few or (error > rounding(x, wide, 16)).any()  # which the bound of fewer rows does not hide


def test_every_value_is_looked_up_right_by_many_rows(native_kernel: kernels.PackedKernel) -> None:
    values, scales = draw(64, 32, 32)
    multiply, ones = native_kernel.multiply(32, torch.float32), native_kernel.scale(torch.ones_like(scales))
    result = multiply(127 * torch.eye(64), native_kernel.pack(values), ones)
    assert torch.equal(result, 127 * values.float())


def test_every_value_is_looked_up_right(kernel: kernels.PackedKernel) -> None:
    """One input at a time: each result is one weight, exactly."""
    values, scales = draw(64, 32, 32)
    multiply, packed = kernel.multiply(32, torch.float32), kernel.pack(values)
    ones = kernel.scale(torch.ones_like(scales))
    halves = [multiply(rows, packed, ones) for rows in torch.eye(64).bfloat16().split(32)]
    assert torch.equal(torch.cat(halves), values.float())


def test_parts_and_threads_change_nothing(kernel: kernels.PackedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not contiguous, and more threads than blocks of columns."""
    values, scales = draw(256, 32, 64)
    multiply, packed, factors = kernel.multiply(64, torch.bfloat16), kernel.pack(values), kernel.scale(scales)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = multiply(x[::2, :256].clone(), packed, factors)
    monkeypatch.setattr(kernels, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(multiply(x[::2, :256], packed, factors), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 8, 32])
def test_inputs_are_rounded_to_16_bits_of_128(
    native_kernel: kernels.PackedKernel, rows: int, dtype: torch.dtype
) -> None:
    """Values of very different sizes in different parts and rows."""
    values, scales = draw(512, 80, 256)
    wide = values.double() * scales.double().repeat_interleave(256, 0)
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.exp2(torch.randint(-60, 60, (rows, 4, 1), generator=generator))
    x = (torch.randn(rows, 4, 128, generator=generator) * sizes).view(rows, 512).to(dtype)
    result = native_kernel.multiply(256, torch.float32)(x, native_kernel.pack(values), native_kernel.scale(scales))
    assert ((result.double() - x.double() @ wide).abs() <= rounding(x, wide)).all()


@pytest.mark.parametrize("rows", [9, 41])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_is_nothing_else(native_kernel: kernels.PackedKernel, value: float, rows: int) -> None:
    values, scales = draw(256, 32, 64)
    multiply, packed, factors = (
        native_kernel.multiply(64, torch.float32),
        native_kernel.pack(values),
        native_kernel.scale(scales),
    )
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    expected = multiply(x, packed, factors)
    x[3, 200] = value
    result = multiply(x, packed, factors)
    assert result[3].isnan().all()
    assert torch.equal(result[torch.arange(rows) != 3], expected[torch.arange(rows) != 3])


@pytest.mark.parametrize(
    ("rows", "size"),
    [*itertools.product([1, kernels.FEWEST_SHORT], [0.0, 1e-45, 2.0**-110]), (1, 2.0**127), (33, 2.0**116)],
)
def test_the_smallest_and_the_largest_inputs(native_kernel: kernels.PackedKernel, rows: int, size: float) -> None:
    """With many rows a group's offset, here 256 times the result, is taken off in fp32."""
    values = torch.eye(64, 16).to(torch.int8)
    multiply, ones = native_kernel.multiply(32, torch.float32), native_kernel.scale(torch.ones(2, 16))
    result = multiply(torch.full((rows, 64), size), native_kernel.pack(values), ones)
    expected = torch.full((rows, 16), size if size > 1e-40 else 0.0)
    assert torch.allclose(result, expected, rtol=0 if rows == 1 else 256 * 2**-23, atol=0)


@pytest.fixture(params=["native", "portable"])
def wide_kernel(request: pytest.FixtureRequest) -> kernels.PackedKernel:
    return kernels.native_kernel("int8", load(request.param))


@pytest.mark.parametrize(("width", "columns"), [(8, 16), (264, 48), (512, 80)])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_products_of_int8(wide_kernel: kernels.PackedKernel, width: int, columns: int, held: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(-127, 128, (columns, width), generator=generator, dtype=torch.int8).t()
    scales = 0.01 + torch.rand(1, columns, generator=generator)
    multiply = wide_kernel.multiply(width, held)
    packed, factors, wide = wide_kernel.pack(values), wide_kernel.scale(scales), values.double() * scales.double()
    assert packed.numel() == values.numel()
    for rows in range(1, 18):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        result, expected = multiply(x, packed, factors), x.double() @ wide
        assert result.dtype is held and result.shape == (rows, columns)
        bound = 2**-8 * expected.abs() * (held is torch.bfloat16) + rounding(x, wide)
        assert ((result.double() - expected).abs() <= bound).all()


def test_every_int8_value_is_widened_right(wide_kernel: kernels.PackedKernel) -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).view(16, 16).repeat(1, 16)
    multiply, ones = wide_kernel.multiply(16, torch.float32), wide_kernel.scale(torch.ones(1, 256))
    assert torch.equal(multiply(torch.eye(16).bfloat16(), wide_kernel.pack(values), ones), values.float())


@pytest.mark.parametrize(("width", "columns"), [(12, 16), (16, 24)])
def test_what_the_int8_kernel_does_not_take(width: int, columns: int) -> None:
    assert kernels.pick_kernel("int8", width, columns) is None


@pytest.mark.parametrize(("group", "columns"), list(itertools.product([16, 48, 64], [16, 24])))
def test_what_no_kernel_takes(group: int, columns: int) -> None:
    assert (kernels.pick_kernel("int4", group, columns) is not None) == (group == 64 and columns == 16)


def test_without_a_compiler_torchs_kernel_runs(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert kernels.pick_kernel("int4", 64, 64) is kernels.TORCH
    assert kernels.pick_kernel("int8", 64, 64) is None


def test_a_compiler_that_fails_is_as_none(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert kernels.pick_kernel("int4", 64, 64) is kernels.TORCH
    assert kernels.pick_kernel("int8", 64, 64) is None
