from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.errors import ExecutionError, UnsupportedLayerError
from tests.interpreter.networks import feed, read, run

DATA = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_gather_takes_indices_of_any_shape_and_sign(axis: int, shape: tuple[int, ...]) -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, 3, 4))
        return {"y": g.gather("y", x, feed(g, "i", "int32", (-1,) * len(shape)), axis)}

    indices = torch.tensor([1, -1, 0, -2], dtype=torch.int32)[: int(np.prod(shape))].reshape(shape)
    expected = np.take(DATA.numpy(), indices.numpy(), axis=axis)
    np.testing.assert_array_equal(run(read(build), x=DATA, i=indices)["y"].numpy(), expected)


def test_gather_outside_the_data_names_the_layer() -> None:
    made = read(lambda g: {"y": g.gather("lookup", feed(g, "x", "float32", (3,)), feed(g, "i", "int32", (-1,)))})
    with pytest.raises(ExecutionError, match="layer lookup"):
        run(made, x=torch.zeros(3), i=torch.tensor([3], dtype=torch.int32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gather_of_a_16_bit_constant_is_widened_row_by_row(dtype: str) -> None:
    from pipeline.checkpoint.tensors import RawTensor

    table = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))

    def build(g: Any) -> dict[str, Any]:
        rows = g.gather("rows", g.constant("table", RawTensor.from_torch(table)), feed(g, "i", "int32", (-1,)))
        return {"y": rows}

    indices = torch.tensor([5, 0, 5], dtype=torch.int32)
    assert torch.equal(run(read(build), i=indices)["y"], table[indices].float())
    assert torch.equal(run(read(build), "declared", i=indices)["y"], table[indices])


def test_gather_elements_and_nd() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (2, 3, 4))
        element = g.network.add_gather_v2(x, feed(g, "e", "int32", (2, 3, 2)), g.trt.GatherMode.ELEMENT)
        element.axis = 2
        nd = g.network.add_gather_v2(x, feed(g, "n", "int32", (-1, 2)), g.trt.GatherMode.ND)
        return {"element": element.get_output(0), "nd": nd.get_output(0)}

    e = torch.tensor([0, -1], dtype=torch.int32).expand(2, 3, 2).contiguous()
    n = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
    result = run(read(build), x=DATA, e=e, n=n)
    assert torch.equal(result["element"], DATA[..., [0, 3]])
    assert torch.equal(result["nd"], torch.stack([DATA[1, 2], DATA[0, 0]]))


@pytest.mark.parametrize(
    ("first", "shape", "second", "expected"),
    [
        (None, (-1, 6), None, lambda x: x.reshape(-1, 6)),
        ((2, 0, 1), None, None, lambda x: x.transpose(2, 0, 1)),
        ((1, 0, 2), (0, -1), None, lambda x: x.transpose(1, 0, 2).reshape(3, -1)),
        (None, (4, 0, -1), (2, 1, 0), lambda x: x.reshape(4, 3, -1).transpose(2, 1, 0)),
        ((0, 2, 1), None, (1, 0, 2), lambda x: x.transpose(0, 2, 1).transpose(1, 0, 2)),
    ],
)
def test_shuffle_transposes_reshapes_transposes(first: Any, shape: Any, second: Any, expected: Any) -> None:
    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_shuffle(feed(g, "x", "float32", (2, 3, 4)))
        if first is not None:
            layer.first_transpose = g.trt.Permutation(first)
        if shape is not None:
            layer.reshape_dims = shape
        if second is not None:
            layer.second_transpose = g.trt.Permutation(second)
        return {"y": layer.get_output(0)}

    np.testing.assert_array_equal(run(read(build), x=DATA)["y"].numpy(), expected(DATA.numpy()))


def test_shuffle_to_and_from_a_scalar() -> None:
    def build(g: Any) -> dict[str, Any]:
        scalar = g.reshape("scalar", feed(g, "x", "float32", (1,)), ())
        return {"scalar": scalar, "row": g.reshape("row", scalar, (1, 1))}

    result = run(read(build), x=torch.tensor([7.0]))
    assert result["scalar"].shape == () and result["row"].shape == (1, 1)


def test_shuffle_takes_dimensions_that_the_network_computes() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, -1, 4))
        sizes = g.shape("sizes", x)
        rows = g.product("rows", g.slice("b", sizes, 0, 0, 1), g.slice("s", sizes, 0, 1, 1))
        layer = g.network.add_shuffle(x)
        layer.set_input(1, g.concatenate("dims", [rows, g.number("four", [4], "int64")], 0))
        return {"y": layer.get_output(0)}

    assert torch.equal(run(read(build), x=DATA)["y"], DATA.reshape(6, 4))


@pytest.mark.parametrize(
    ("start", "size", "stride", "expected"),
    [
        ((0, 1, 0), (2, 2, 4), (1, 1, 1), DATA[:, 1:3]),
        ((0, 0, 1), (2, 3, 2), (1, 1, 2), DATA[..., 1::2]),
        ((1, 2, 3), (2, 3, 4), (-1, -1, -1), DATA.flip(0, 1, 2)),
        ((1, 0, 0), (5, 3, 4), (0, 1, 1), DATA[1:].expand(5, 3, 4)),
    ],
)
def test_slice_steps_forward_back_and_in_place(start: Any, size: Any, stride: Any, expected: torch.Tensor) -> None:
    made = read(
        lambda g: {"y": g.network.add_slice(feed(g, "x", "float32", (2, 3, 4)), start, size, stride).get_output(0)}
    )
    assert torch.equal(run(made, x=DATA)["y"], expected)


def test_slice_of_one_axis() -> None:
    made = read(lambda g: {"y": g.slice("y", feed(g, "x", "float32", (-1, 3, 4)), 2, 1, 2)})
    assert torch.equal(run(made, x=DATA)["y"], DATA[..., 1:3])


def test_slice_takes_a_size_that_the_network_computes() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, 3))
        rows = g.slice("rows", g.shape("sizes", feed(g, "like", "float32", (-1,))), 0, 0, 1)
        layer = g.network.add_slice(x, (0, 1), (0, 0), (1, 1))
        layer.set_input(2, g.concatenate("size", [rows, g.number("two", [2], "int64")], 0))
        return {"y": layer.get_output(0)}

    x = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(run(read(build), x=x, like=torch.zeros(3))["y"], x[:3, 1:])


def test_slice_outside_the_data_names_the_layer() -> None:
    def build(g: Any) -> dict[str, Any]:
        return {"y": g.slice("cut", feed(g, "x", "float32", (-1,)), 0, 2, 3)}

    with pytest.raises(ExecutionError, match="layer cut"):
        run(read(build), x=torch.zeros(4))


def test_a_slice_mode_that_is_not_executed_is_refused() -> None:
    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_slice(feed(g, "x", "float32", (4,)), (2,), (4,), (1,))
        layer.name, layer.mode = "around", g.trt.SampleMode.WRAP
        return {"y": layer.get_output(0)}

    with pytest.raises(UnsupportedLayerError, match=r"around.*wrap"):
        run(read(build), x=torch.zeros(4))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenation(axis: int) -> None:
    made = read(
        lambda g: {"y": g.concatenate("y", [feed(g, n, "float32", (2, 3, 4)) for n in ("a", "b")], axis)},
    )
    assert torch.equal(run(made, a=DATA, b=DATA * 2)["y"], torch.cat([DATA, DATA * 2], axis))
