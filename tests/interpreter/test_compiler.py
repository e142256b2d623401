import gc
import weakref
from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.plan import bind
from tests.interpreter.memory import measure_peak
from tests.interpreter.networks import feed, read, run

SIZE = 1 << 20


@pytest.mark.parametrize("optimize", [False, True])
def test_a_tensor_is_let_go_after_its_last_use(optimize: bool) -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1,))
        for index in range(16):
            x = g.sum(f"sum.{index}", g.unary(f"sqrt.{index}", x, "SQRT"), x)
        return {"y": x}

    interpreter = Interpreter(read(build), mode="exact", optimize=optimize)
    x = torch.ones(SIZE)
    assert measure_peak(lambda: interpreter.run({"x": x})) <= 3.1 * 4 * SIZE


def test_what_depends_on_constants_only_is_computed_once() -> None:
    def build(g: Any) -> dict[str, Any]:
        scale = g.unary("root", g.number("four", [[4.0]], "float32"), "SQRT")
        return {"y": g.product("y", feed(g, "x", "float32", (-1, 2)), g.reshape("again", scale, (1, 1)))}

    program = read(build)
    interpreter = Interpreter(program, mode="exact", optimize=False)
    assert interpreter.run({"x": torch.ones(1, 2)})["y"].tolist() == [[2, 2]]
    assert interpreter._plan(frozenset()).layers == ("y",)  # no step for the rest


@pytest.mark.parametrize("resident_bytes", [None, 0])
def test_weights_are_let_go_with_their_interpreter(resident_bytes: int | None) -> None:
    """Not when the collector comes: by then several layers of a large model would be there."""

    def build(g: Any) -> dict[str, Any]:
        stored = RawTensor.from_torch(torch.randn(256, 256).bfloat16())  # beyond what is kept whatever the budget
        weight = g.cast("weight", g.constant("stored", stored), "float32")
        return {"y": g.matmul("y", feed(g, "x", "float32", (-1, 256)), weight)}

    gc.disable()
    try:
        interpreter = Interpreter(read(build), mode="exact", resident_bytes=resident_bytes)
        interpreter.run({"x": torch.ones(1, 256)})
        stored = [weakref.ref(constant.data) for constant in interpreter.program.constants.values()]
        prepared = [weakref.ref(tensor) for tensor in interpreter._constants._prepared.values()]
        assert stored and bool(prepared) == (resident_bytes is None)
        del interpreter
        assert [found() for found in (*stored, *prepared)] == [None] * len(stored + prepared)
    finally:
        gc.enable()


def test_an_output_may_be_a_constant_a_shape_or_an_input_seen_otherwise() -> None:
    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, 3))
        return {
            "constant": g.identity("same", g.number("number", [1.5, 2.5], "float32")),
            "shape": g.shape("sizes", x),
            "view": g.reshape("flat", x, (-1,)),
        }

    result = run(read(build), x=torch.ones(2, 3))
    assert result["constant"].tolist() == [1.5, 2.5]
    assert result["shape"].tolist() == [2, 3] and result["shape"].dtype == torch.int64
    assert result["view"].shape == (6,)


def test_one_embedding_serves_lookup_and_head() -> None:
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def build(g: Any) -> dict[str, Any]:
        weight = g.constant("embedding", RawTensor.from_torch(table))
        rows = g.gather("rows", weight, feed(g, "ids", "int32", (-1,)))
        return {"logits": g.matmul("head", rows, weight, transpose=True)}

    ids = torch.tensor([3, 0], dtype=torch.int32)
    wide = table.float()
    torch.testing.assert_close(run(read(build), ids=ids)["logits"], wide[ids] @ wide.t())


@pytest.mark.parametrize("reads", [(), (1,), (1, 2), (2, 0, 1)])
def test_steps_of_any_arity_read_and_write_their_slots(reads: tuple[int, ...]) -> None:
    values = [None, "a", "b", None, None]
    bind(lambda *given: given, reads, (3,))(values)
    assert values[3] == tuple(values[slot] for slot in reads)
    bind(lambda *given: ("first", "second"), reads, (3, 4))(values)
    assert values[3:] == ["first", "second"]
