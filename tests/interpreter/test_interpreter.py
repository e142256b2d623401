from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CompatibilityError
from pipeline.interpreter.errors import FeedError
from pipeline.interpreter.interpreter import Interpreter
from pipeline.network.program import Program
from tests.interpreter.networks import feed, read


def chain(dtype: str = "float16") -> Program:
    """y = exp(x) w, with a cache beside it."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))

    def build(g: Any) -> dict[str, Any]:
        x = g.unary("exp", feed(g, "x", dtype, (-1, 4)), "EXP")
        cache = feed(g, "cache", dtype, (-1, 1, 4, 4))
        starts, lengths = feed(g, "starts", "int32", (-1,)), feed(g, "lengths", "int32", (-1,))
        out = g.update_cache("append", cache, g.reshape("rows", x, (-1, 1, 4)), starts, lengths)
        return {"y": g.matmul("product", x, g.constant("w", RawTensor.from_torch(weight))), "cache_out": out}

    return read(build, dtype)


def feeds(dtype: torch.dtype, **changes: Any) -> dict[str, torch.Tensor]:
    given = {
        "x": torch.zeros(2, 4, dtype=dtype),
        "cache": torch.zeros(3, 1, 4, 4, dtype=dtype),
        "starts": torch.zeros(3, dtype=torch.int32),
        "lengths": torch.tensor([0, 0, 2, 2], dtype=torch.int32),
    }
    return {name: tensor for name, tensor in {**given, **changes}.items() if tensor is not None}


def test_outputs_are_in_the_types_of_the_mode() -> None:
    for mode, held in (("exact", torch.float32), ("declared", torch.float16)):
        outputs = Interpreter(chain(), mode=mode).run(feeds(held))
        assert outputs.keys() == {"y", "cache_out"}
        assert outputs["y"].dtype == outputs["cache_out"].dtype == held


def test_the_cache_given_is_the_cache_written() -> None:
    given = feeds(torch.float32)
    outputs = Interpreter(chain(), mode="exact").run(given)
    assert outputs["cache_out"].data_ptr() == given["cache"].data_ptr()
    assert given["cache"].sum() == 8 and (given["cache"][1, 0, :2] == 1).all()


def test_taps_return_any_tensor_beside_the_outputs() -> None:
    interpreter = Interpreter(chain(), mode="exact")
    outputs = interpreter.run(feeds(torch.float32), taps=["exp", "w", "x"])
    assert outputs.keys() == {"y", "cache_out", "exp", "w", "x"}
    torch.testing.assert_close(outputs["exp"] @ outputs["w"], outputs["y"])
    assert interpreter.run(feeds(torch.float32)).keys() == {"y", "cache_out"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "input x is missing, not float32"),
        ({"x": torch.zeros(2, 5)}, r"input x is float32 \[2, 5\], not float32 \[-1, 4\]"),
        ({"x": torch.zeros(4)}, r"input x is float32 \[4\]"),
        ({"starts": torch.zeros(3)}, "input starts is float32"),
        ({"cache": torch.zeros(3, 1, 4, 4, dtype=torch.float16)}, "input cache is float16"),
        ({"cache": torch.zeros(3, 1, 4, 8)[..., ::2]}, "input cache is float32"),
        ({"more": torch.zeros(1)}, "unknown inputs more"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FeedError, match=message):
        Interpreter(chain(), mode="exact").run(feeds(torch.float32, **changes))


def test_an_unknown_tap_or_mode_is_refused() -> None:
    with pytest.raises(FeedError, match="no tensors nowhere"):
        Interpreter(chain(), mode="exact").run(feeds(torch.float32), taps=["nowhere"])
    mode: Any = "quick"
    with pytest.raises(CompatibilityError, match="mode 'quick' is unknown"):
        Interpreter(chain(), mode=mode)


def stack(layers: int, width: int, dtype: str) -> Program:
    """A row of products, each with an INT4 or 16-bit weight of its own."""
    generator = torch.Generator().manual_seed(0)

    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float16", (-1, width))
        for layer in range(layers):
            at = g.at(f"layers.{layer}")
            if dtype == "int4":
                packed = torch.randint(-128, 128, (width, width // 2), generator=generator, dtype=torch.int8)
                scales = torch.full((width // 32, width), 0.01, dtype=torch.float16)
                scale = at.constant("scale", RawTensor.from_torch(scales))
                weight = at.dequantize("dequantize", at.int4("weight", RawTensor.from_torch(packed)), scale)
            else:
                values = torch.randn(width, width, generator=generator).mul(width**-0.5).half()
                weight = at.constant("weight", RawTensor.from_torch(values))
            x = at.matmul("product", x, weight)
        return {"y": x}

    return read(build, "float16")


@pytest.mark.parametrize("dtype", ["int4", "float16"])
@pytest.mark.parametrize("mode", ["exact", "declared"])
def test_weights_beyond_the_budget_are_made_at_each_use(dtype: str, mode: Any) -> None:
    program = stack(4, 1024, dtype)
    held = torch.float32 if mode == "exact" else torch.float16
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)).to(held)
    nbytes = 1024 * 1024 * 4
    interpreters = [Interpreter(program, mode=mode, resident_bytes=budget) for budget in (None, 2 * nbytes, 0)]
    results = [interpreter.run({"x": x})["y"] for interpreter in interpreters]
    for result in results[1:]:
        # Other kernels, other orders of sums: in fp16 that is a rounding more or less in each of four layers.
        largest = results[0].abs().max().item()
        torch.testing.assert_close(result, results[0], rtol=0, atol=largest * (1e-5 if mode == "exact" else 2e-3))
    held_bytes = [interpreter.prepared_bytes for interpreter in interpreters]
    assert held_bytes[0] == 4 * nbytes and 0 < held_bytes[1] <= 2 * nbytes and held_bytes[2] <= 4 * 32 * 1024 * 4


def test_a_weight_made_at_its_use_is_gone_after_it() -> None:
    """With no budget, the peak of one run over sixteen layers stays far below their widened weights."""
    from tests.interpreter.memory import measure_peak

    program = stack(16, 1024, "int4")
    x = torch.zeros(1, 1024)
    interpreter = Interpreter(program, mode="exact", resident_bytes=0)
    interpreter.run({"x": x})
    assert measure_peak(lambda: interpreter.run({"x": x})) < 6 * 1024 * 1024 * 4


EXPERTS = 8


def routed(dtype: str) -> Program:
    """All experts on all rows, twice: [1, T, in] then [E, T, in]."""
    generator = torch.Generator().manual_seed(0)

    def weight(g: Any, name: str) -> Any:
        if dtype == "int4":
            packed = torch.randint(-128, 128, (EXPERTS, 512, 256), generator=generator, dtype=torch.int8)
            scales = torch.rand(EXPERTS, 8, 512, generator=generator).half() * 0.01
            q = g.int4(f"{name}.packed", RawTensor.from_torch(packed))
            return g.dequantize(f"{name}.weight", q, g.constant(f"{name}.scales", RawTensor.from_torch(scales)))
        values = torch.randn(EXPERTS, 512, 512, generator=generator).mul(512**-0.5).half()
        return g.constant(f"{name}.weight", RawTensor.from_torch(values))

    def build(g: Any) -> dict[str, Any]:
        rows = g.reshape("rows", feed(g, "x", "float16", (-1, 512)), (1, -1, 512))
        inner = g.matmul("up", rows, weight(g, "up"), transpose=dtype != "int4")
        return {"y": g.matmul("down", inner, weight(g, "down"))}

    return read(build, "float16")


@pytest.mark.parametrize("dtype", ["int4", "float16"])
@pytest.mark.parametrize("mode", ["exact", "declared"])
def test_of_a_stack_beyond_the_budget_one_expert_is_made_at_a_time(dtype: str, mode: Any) -> None:
    from tests.interpreter.memory import measure_peak

    program = routed(dtype)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(
        torch.float32 if mode == "exact" else torch.float16
    )
    whole, parts = (Interpreter(program, mode=mode, resident_bytes=budget) for budget in (None, 0))
    expected, result = whole.run({"x": x})["y"], parts.run({"x": x})["y"]
    largest = expected.abs().max().item()
    torch.testing.assert_close(result, expected, rtol=0, atol=largest * (1e-5 if mode == "exact" else 2e-3))
    one = 512 * 512 * 4
    assert measure_peak(lambda: parts.run({"x": x})) < 4 * one
    assert parts.prepared_bytes < one < EXPERTS * one <= whole.prepared_bytes


def test_plans_with_other_taps_share_what_was_prepared() -> None:
    interpreter = Interpreter(stack(2, 1024, "int4"), mode="exact")
    before = interpreter.prepared_bytes
    outputs = interpreter.run({"x": torch.zeros(1, 1024)}, taps=["layers.0.product"])
    assert "layers.0.product" in outputs and interpreter.prepared_bytes == before
