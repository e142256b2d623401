"""Dense routed experts run only where they are wanted, and the sum stays the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipeline.checkpoint.tensors import RawTensor
from pipeline.interpreter.fusion import fuse
from pipeline.interpreter.graph import Graph
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Numerics
from pipeline.interpreter.rules import experts
from pipeline.network.program import Program
from tests.interpreter.networks import feed, read

E, H, WIDTH, GROUP = 6, 512, 128, 32


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


STATIC = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def network(
    dtype: str,
    *,
    int4: bool = False,
    static: str = "",
    rounds: bool = True,
    prescales: int = 0,
    broken: Sequence[int] = (),
    axis: int = 0,
) -> Program:
    """`broken` experts are NaN throughout. prescales: 0, 1 for all experts, or E. static: weights of that type under
    one scale, each expert's outputs multiplied by factors; with `rounds`, inputs in steps to the same type."""

    def build(g: Any) -> dict[str, Any]:
        def apply(name: str, x: Any, wide: int, out: int, seed: int) -> Any:
            if prescales:
                scale = 0.5 + draw(prescales, 1, wide, seed=seed + 10).abs()
                x = g.product(f"{name}.scaled", x, g.constant(f"{name}.scale", RawTensor.from_torch(scale.to(held))))
            if static:
                return apply_static(name, x, wide, out, seed)
            values = draw(E, out, wide, seed=seed) / wide**0.5
            if not int4:
                values[list(broken)] = torch.nan
                weight = g.constant(f"{name}.weight", RawTensor.from_torch(values.to(held)))
                return g.matmul(name, x, weight, transpose=True)
            scales = draw(E, wide // GROUP, out, seed=seed).abs() / 20
            scales[list(broken)] = torch.nan
            q = torch.randint(-8, 8, (E, wide, out), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
            packed = q[..., 0::2] & 15 | q[..., 1::2] << 4
            constant = g.int4(f"{name}.packed", RawTensor.from_torch(packed))
            weight = g.dequantize(
                f"{name}.dq", constant, g.constant(f"{name}.s", RawTensor.from_torch(scales.to(held)))
            )
            return g.matmul(name, x, weight)

        def apply_static(name: str, x: Any, wide: int, out: int, seed: int) -> Any:
            stored, largest = STATIC[static]
            if rounds:
                step = g.number(f"{name}.step", [4 / largest], "float32")
                x = g.dequantize_as_model(f"{name}.back", g.quantize(f"{name}.input", x, step, static), step)
            q = (draw(E, out, wide, seed=seed) * largest / 4).clamp(-largest, largest)
            q = (q.round() if stored is torch.int8 else q).to(stored)
            weight = g.dequantize_as_model(
                f"{name}.dq",
                g.constant(f"{name}.weight", RawTensor.from_torch(q)),
                g.number(f"{name}.s", [4 / largest / wide**0.5], "float32"),
            )
            factors = 0.5 + draw(E, 1, out if stored is torch.int8 else 1, seed=seed + 20).abs()
            factors[list(broken)] = torch.nan
            product = g.cast(f"{name}.wide", g.matmul(f"{name}.product", x, weight, transpose=True), "float32")
            scaled = g.product(f"{name}.multiplied", product, g.constant(f"{name}.f", RawTensor.from_torch(factors)))
            return g.cast(name, scaled, dtype)

        held = getattr(torch, dtype)
        rows = g.reshape("rows", feed(g, "x", dtype, (-1, H)), (1, -1, H))
        gate = apply("fc", rows, H, WIDTH, 1)
        silu = g.product("silu", gate, g.sigmoid("sigmoid", gate))
        down = apply("down", g.product("gated", silu, apply("up", rows, H, WIDTH, 2)), WIDTH, H, 3)
        weighted = g.product("weighted", g.cast("wide", down, "float32"), feed(g, "weights", "float32", (E, -1, 1)))
        return {"y": g.reduce("y", weighted, "SUM", axis, keep=False)}

    return read(build, dtype)


def choose(rows: int, *, among: Sequence[int]) -> torch.Tensor:
    """Two experts for each row."""
    weights = torch.zeros(E, rows, 1)
    generator = torch.Generator().manual_seed(rows)
    for row in range(rows):
        for expert in torch.randperm(len(among), generator=generator)[:2].tolist():
            weights[among[expert], row] = torch.rand(1, generator=generator) + 0.1
    return weights


def run(program: Program, mode: Any, weights: torch.Tensor, **options: Any) -> torch.Tensor:
    x = draw(weights.shape[1], H, seed=9).to(getattr(torch, program.inputs[0].dtype))
    interpreter = Interpreter(program, mode=mode, **options)
    return interpreter.run({"x": x.float() if mode == "exact" else x, "weights": weights})["y"]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("prescales", [0, 1, E])
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("room", [None, 0])
def test_the_sum_is_that_of_all_experts(rows: int, prescales: int, int4: bool, room: int | None) -> None:
    program, weights = network("float16", int4=int4, prescales=prescales), choose(rows, among=range(E))
    whole = run(program, "exact", weights, optimize=False)
    torch.testing.assert_close(run(program, "exact", weights, resident_bytes=room), whole, rtol=1e-5, atol=1e-5)
    spread = whole.std().item()
    for mode, tolerance in (("declared", 0.025), ("fast", 0.15)):
        difference = (run(program, mode, weights, resident_bytes=room) - whole).abs().max().item()
        assert 0 < difference < tolerance * spread, mode


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize(("rounds", "prescales"), [(True, 0), (True, E), (False, 0)])
@pytest.mark.parametrize("rows", [1, 12])
def test_eight_bits_are_rounded_and_scaled_as_in_the_whole(
    dtype: str, static: str, rounds: bool, prescales: int, rows: int
) -> None:
    program = network(dtype, static=static, rounds=rounds, prescales=prescales)
    weights = choose(rows, among=range(E))
    assert any(node.kind == "chosen_experts" for node in fuse(Graph.of(program, ()), Numerics("exact")).nodes)
    for mode in ("exact", "declared"):
        whole, found = (run(program, mode, weights, optimize=optimize) for optimize in (False, True))
        # A product apart in its last bit may be rounded to the next step.
        bound = 1e-5 if mode == "exact" and not rounds else 5e-3
        assert (found - whole).abs().max() <= bound * whole.abs().max(), mode


KINDS: list[dict[str, Any]] = [{"int4": False}, {"int4": True}, {"static": "int8"}, {"static": "fp8", "rounds": False}]


@pytest.mark.parametrize("mode", ["exact", "declared", "fast"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 12])
def test_an_expert_that_no_row_chose_does_not_run(mode: str, kind: dict[str, Any], rows: int) -> None:
    """Its weights are NaN: run at all, it would turn every row into NaN, a zero weight or not."""
    program, weights = network("bfloat16", **kind, broken=[1, 4]), choose(rows, among=[0, 2, 3, 5])
    assert bool(run(program, mode, weights, optimize=False).isnan().all())
    result = run(program, mode, weights)
    assert bool(result.isfinite().all()) and bool(result.any())


def test_rows_without_experts_are_zero() -> None:
    result = run(network("float32", int4=False, prescales=0), "exact", torch.zeros(E, 5, 1))
    assert result.shape == (5, H) and not result.any()


def test_small_experts_are_left_together(monkeypatch: pytest.MonkeyPatch) -> None:
    program = network("float32", int4=False, prescales=0)
    for least, found in ((H * WIDTH, 1), (H * WIDTH + 1, 0)):
        monkeypatch.setattr(experts, "WORTH_SKIPPING", least)
        graph = fuse(Graph.of(program, ()), Numerics("exact"))
        assert sum(node.kind == "chosen_experts" for node in graph.nodes) == found


def test_a_sum_over_something_else_is_left_alone() -> None:
    for axis, found in ((0, 1), (1, 0)):
        graph = fuse(Graph.of(network("float32", int4=False, prescales=0, axis=axis), ()), Numerics("exact"))
        assert sum(node.kind == "chosen_experts" for node in graph.nodes) == found
