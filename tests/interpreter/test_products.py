from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.errors import UnsupportedLayerError
from pipeline.interpreter.operations.products import unpack_int4
from tests.interpreter.networks import feed, read, run


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("flip_a", [False, True])
@pytest.mark.parametrize("flip_b", [False, True])
@pytest.mark.parametrize(("left", "right"), [((), ()), ((3,), (3,)), ((1,), (3,)), ((2, 1), (1, 3))])
def test_products_transpose_and_broadcast(flip_a: bool, flip_b: bool, left: Any, right: Any) -> None:
    a, b = random(*left, 4, 5), random(*right, 5, 6, seed=1)

    def build(g: Any) -> dict[str, Any]:
        op = g.trt.MatrixOperation
        tensors = [feed(g, name, "float32", (*x.shape[:-2], -1, -1)) for name, x in (("a", a), ("b", b))]
        ops = [op.TRANSPOSE if flip else op.NONE for flip in (flip_a, flip_b)]
        return {"y": g.network.add_matrix_multiply(tensors[0], ops[0], tensors[1], ops[1]).get_output(0)}

    given = [x.transpose(-1, -2).contiguous() if flip else x for x, flip in ((a, flip_a), (b, flip_b))]
    result = run(read(build), a=given[0], b=given[1])["y"]
    np.testing.assert_allclose(result.numpy(), a.numpy() @ b.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_declared_products_accumulate_wide_and_round_once(dtype: str, constant: bool, transpose: bool) -> None:
    held = getattr(torch, dtype)
    a, w = random(7, 512).to(held), random(512, 48, seed=1).to(held)
    weight = (w.t() if transpose else w).contiguous()

    def build(g: Any) -> dict[str, Any]:
        b = g.constant("w", RawTensor.from_torch(weight)) if constant else feed(g, "w", dtype, tuple(weight.shape))
        return {"y": g.matmul("y", feed(g, "a", dtype, (-1, 512)), b, transpose=transpose)}

    feeds = {"a": a} if constant else {"a": a, "w": weight}
    wide = a.double() @ w.double()
    place = torch.finfo(held).eps * 64  # a unit in the last place of the largest sums
    declared = run(read(build, dtype), "declared", atol=place, **feeds)["y"]
    assert declared.dtype == held
    # fp32 accumulation moves a sum by at most a few units of its last fp32 place: a rounding flips only near a tie.
    near = torch.finfo(held).eps * wide.abs() * 0.5 + 1e-4
    assert ((declared.double() - wide).abs() <= near).all()
    exact = run(read(build, dtype), "exact", atol=1e-4, **feeds)["y"]
    assert exact.dtype == torch.float32
    np.testing.assert_allclose(exact.double().numpy(), wide.numpy(), rtol=1e-5, atol=1e-4)


def test_unpacked_int4_is_twos_complement_low_nibble_first() -> None:
    packed = torch.tensor([[0x10, -1], [-128, 0x7F]], dtype=torch.int8)
    assert unpack_int4(packed, (2, 4)).tolist() == [[0, 1, -1, -1], [0, -8, -1, 7]]


def pack(q: torch.Tensor) -> RawTensor:
    nibbles = q.reshape(-1, 2).numpy().astype(np.uint8) & 15
    data = nibbles[:, 0] | nibbles[:, 1] << 4
    return RawTensor("I8", (*q.shape[:-1], q.shape[-1] // 2), data)


@pytest.mark.parametrize("blocks", [(4, 1), (1, 2)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dequantized_blocks(blocks: tuple[int, int], dtype: str) -> None:
    held = getattr(torch, dtype)
    q = torch.randint(-8, 8, (8, 6), generator=torch.Generator().manual_seed(0))
    scales = (0.01 + random(8 // blocks[0], 6 // blocks[1]).abs()).to(held)

    def build(g: Any) -> dict[str, Any]:
        scale = g.constant("scale", RawTensor.from_torch(scales))
        weight = g.dequantize("weight", g.int4("q", pack(q)), scale)
        return {"y": g.matmul("y", feed(g, "x", dtype, (-1, 8)), weight)}

    wide = q.numpy() * np.repeat(np.repeat(scales.double().numpy(), blocks[0], 0), blocks[1], 1)
    identity = torch.eye(8)
    exact = run(read(build, dtype), "exact", x=identity)["y"]
    np.testing.assert_allclose(exact.numpy(), wide, rtol=1e-6)
    declared = run(read(build, dtype), "declared", x=identity.to(held))["y"]
    assert torch.equal(declared, torch.from_numpy(wide).to(held))


@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_and_dequantize_int8_by_channel(axis: int) -> None:
    x, scales = random(3, 4) * 2, torch.tensor([0.5, 0.01, 0.25, 1.0][: 3 + axis])

    def build(g: Any) -> dict[str, Any]:
        scale = g.constant("scale", RawTensor.from_torch(scales))
        quantize = g.network.add_quantize(feed(g, "x", "float32", (3, 4)), scale, g.trt.int8)
        quantize.axis = axis
        dequantize = g.network.add_dequantize(quantize.get_output(0), scale, g.trt.float32)
        dequantize.axis = axis
        return {"q": quantize.get_output(0), "y": dequantize.get_output(0)}

    result = run(read(build), x=x)
    scale = scales.numpy()[:, None] if axis == 0 else scales.numpy()[None, :]
    expected = np.clip(np.round(x.numpy() / scale), -128, 127)
    assert result["q"].dtype == torch.int8
    np.testing.assert_array_equal(result["q"].numpy(), expected)
    np.testing.assert_allclose(result["y"].numpy(), expected * scale, rtol=1e-6)


def test_quantize_to_fp8_saturates() -> None:
    def build(g: Any) -> dict[str, Any]:
        scale = g.number("scale", 0.5, "float32")
        q = g.network.add_quantize(feed(g, "x", "float32", (-1,)), scale, g.trt.fp8).get_output(0)
        return {"y": g.network.add_dequantize(q, scale, g.trt.float32).get_output(0)}

    x = torch.tensor([0.0, 1.0, 1.05, -3.3, 1e4])
    expected = (x / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(run(read(build), x=x)["y"], expected)
    assert expected[-1] == 224


def test_a_zero_point_is_refused() -> None:
    def build(g: Any) -> dict[str, Any]:
        scale = g.number("scale", 0.5, "float32")
        layer = g.network.add_quantize(feed(g, "x", "float32", (-1,)), scale, g.trt.int8)
        layer.name = "shifted"
        layer.set_input(2, g.number("zero", 0, "int8"))
        return {"y": layer.get_output(0)}

    with pytest.raises(UnsupportedLayerError, match=r"shifted.*zero point"):
        run(read(build), x=torch.zeros(1))
