from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter.networks import feed, read, run

X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
REDUCTIONS = {"SUM": np.sum, "AVG": np.mean, "MAX": np.max, "MIN": np.min, "PROD": np.prod}


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2)])
def test_reduce(op: str, keep: bool, axes: tuple[int, ...]) -> None:
    def build(g: Any) -> dict[str, Any]:
        mask = sum(1 << axis for axis in axes)
        layer = g.network.add_reduce(
            feed(g, "x", "float32", (-1, 4, -1)), getattr(g.trt.ReduceOperation, op), mask, keep
        )
        return {"y": layer.get_output(0)}

    result = run(read(build), x=torch.from_numpy(X))["y"].numpy()
    np.testing.assert_allclose(result, REDUCTIONS[op](X, axis=axes, keepdims=keep), rtol=1e-5)


def test_integer_sums_keep_their_type() -> None:
    made = read(lambda g: {"y": g.reduce("y", feed(g, "x", "int32", (-1, 2)), "SUM", 0, keep=False)})
    result = run(made, x=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))["y"]
    assert result.dtype == torch.int32 and result.tolist() == [4, 6]


def test_16_bit_means_are_rounded_once() -> None:
    """2048 ones and halves: a running fp16 sum would stop growing at 2048."""
    made = read(lambda g: {"y": g.reduce("y", feed(g, "x", "float16", (-1,)), "SUM", 0, keep=True)})
    x = torch.ones(4096, dtype=torch.float16)
    assert run(made, "declared", x=x)["y"].item() == 4096


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax(axis: int) -> None:
    made = read(lambda g: {"y": g.softmax("y", feed(g, "x", "float32", (-1, 4, -1)), axis)})
    shifted = np.exp(X - X.max(axis=axis, keepdims=True))
    np.testing.assert_allclose(
        run(made, x=torch.from_numpy(X))["y"].numpy(), shifted / shifted.sum(axis=axis, keepdims=True), rtol=1e-5
    )


@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("axis", [1, 2])
def test_topk_is_sorted(op: str, axis: int) -> None:
    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_topk(feed(g, "x", "float32", (-1, 4, 5)), getattr(g.trt.TopKOperation, op), 3, 1 << axis)
        return {"values": layer.get_output(0), "indices": layer.get_output(1)}

    result = run(read(build), x=torch.from_numpy(X))
    order = np.argsort(-X if op == "MAX" else X, axis=axis).take(range(3), axis=axis)
    assert result["indices"].dtype == torch.int32
    np.testing.assert_array_equal(result["indices"].numpy(), order)
    np.testing.assert_array_equal(result["values"].numpy(), np.take_along_axis(X, order, axis))


def test_topk_takes_a_k_that_the_network_computes() -> None:
    def build(g: Any) -> dict[str, Any]:
        layer = g.network.add_topk(feed(g, "x", "float32", (4, 5)), g.trt.TopKOperation.MAX, 1, 1 << 1)
        layer.set_input(1, g.number("k", 2, "int32"))
        return {"values": layer.get_output(0)}

    result = run(read(build), x=torch.from_numpy(X[0]))["values"]
    np.testing.assert_array_equal(result.numpy(), -np.sort(-X[0], axis=1)[:, :2])
