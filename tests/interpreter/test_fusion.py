"""Each rewrite is found where it should be, only there, and changes nothing but speed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.fusion import fuse
from pipeline.interpreter.graph import Graph, drop_unused
from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import FAST_MARGIN, Mode, Numerics
from pipeline.network.program import Program
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.interpreter.networks import feed, read, run
from tests.network import models


def kinds(program: Program, mode: Mode = "declared") -> Counter[str]:
    numerics = Numerics(mode)
    return Counter(node.kind for node in fuse(drop_unused(Graph.of(program, ())), numerics).nodes)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("models")
    linears = r"mlp\.(gate|up|down)_proj|experts|o_proj"

    def int4(write: Callable[..., Path], name: str) -> models.Model:
        return models.load_int4(write, folder / name, pattern=linears, group=32, prescale="each", dtype="float16")

    return {
        "llama": models.load(fixtures.llama(folder / "llama")).program(),
        "deepseek_v2": models.load(fixtures.deepseek_v2(folder / "v2")).program(),
        "llama_int4": int4(fixtures.llama, "llama_int4").program(),
        "deepseek_v2_int4": int4(fixtures.deepseek_v2, "v2_int4").program(),
        "llama_int4_plain": models.load_int4(
            fixtures.llama, folder / "plain", pattern=linears, group=32, dtype="bfloat16"
        ).program(),
    }


def test_what_depends_on_the_step_only_is_computed_once(programs: dict[str, Program]) -> None:
    found = kinds(programs["llama"])
    assert [found[kind] for kind in ("cache_rows", "page_rows", "row_turns", "attention_bias")] == [1, 1, 1, 1]
    assert [found[kind] for kind in ("write_cache_rows", "gather_pages", "rotate_rows", "attend")] == [6, 6, 6, 3]
    assert [found[kind] for kind in ("row_index", "take_rows")] == [3, 2 * 3 + 2]  # pad, unpad, logits; mask, head
    assert not [kind for kind in ("kv_cache_update", "rotary_embedding", "rotate", "attention") if found[kind]]


def test_fast_mode_does_in_one_what_shares_an_input(programs: dict[str, Program]) -> None:
    found = kinds(programs["llama_int4_plain"], "fast")
    assert [found[kind] for kind in ("rotate_into_cache", "head_turns", "rotate_rows", "rotate_heads")] == [3, 1, 0, 0]
    assert [found[kind] for kind in ("write_cache_rows", "cache_rows")] == [0, 1]
    assert [found[kind] for kind in ("sum_norm", "rms_norm")] == [2 * 3 - 1, 2]  # all but the ends of the stream
    assert [found[kind] for kind in ("linears_packed", "linear_packed", "linear")] == [3, 2 * 3, 3 + 1]  # qkv is 16-bit
    scaled = kinds(programs["llama_int4"], "fast")  # each linear scales its own input
    assert [scaled[kind] for kind in ("linears_packed", "linear_packed")] == [0, 4 * 3]
    assert [found[kind] for kind in ("attend_packed", "attend", "gather_pages", "page_rows")] == [3, 0, 0, 1]
    latent = kinds(programs["deepseek_v2_int4"], "fast")  # q and k are no slices of one tensor
    assert [latent[kind] for kind in ("rotate_heads", "rotate_into_cache", "write_cache_rows")] == [0, 0, 0]
    assert [latent[kind] for kind in ("join_rotated", "write_joined", "concatenation")] == [3, 3, 0]
    assert [latent[kind] for kind in ("attend_latent", "attend", "gather")] == [3, 0, 1]  # of the embedding


def test_norms_and_constant_products_are_found(programs: dict[str, Program]) -> None:
    llama, v2 = kinds(programs["llama"]), kinds(programs["deepseek_v2"])
    assert llama["rms_norm"] == 2 * 3 + 1 and v2["rms_norm"] == 4 * 3 + 1
    assert llama["linear"] == 5 * 3 + 1 and not llama["matrix_multiply"]
    assert not llama["reduce"] and not v2["matrix_multiply"]
    assert llama["gate"] == 3 and v2["gate"] == 3 + 2
    assert not llama["activation"] and not v2["activation"]
    assert kinds(programs["llama_int4"])["linear"] == llama["linear"]


SHAPES = [
    [Chunk(tokens=range(5, 18), start=0, block_table=[3, 1]), Chunk(tokens=[7, 8], start=0, block_table=[6])],
    [Chunk(tokens=[9], start=13, block_table=[3, 1]), Chunk(tokens=range(40, 49), start=2, block_table=[6, 2])],
    [Chunk(tokens=[4], start=14, block_table=[3, 1], logits="all"), Chunk(tokens=[2], start=11, block_table=[6, 2])],
]


def run_steps(runner: InterpreterRunner, taps: tuple[str, ...] = ()) -> list[dict[str, torch.Tensor]]:
    runner.allocate(8)
    plans = [plan_step(chunks, block_size=8, num_blocks=8) for chunks in SHAPES]
    return [{name: t.clone() for name, t in runner.run(plan.inputs, taps=taps).items()} for plan in plans]


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "llama_int4", "deepseek_v2_int4"])
def test_exact_values_are_the_same_with_and_without(programs: dict[str, Program], name: str) -> None:
    fused = run_steps(InterpreterRunner(programs[name], mode="exact"))
    plain = run_steps(InterpreterRunner(programs[name], mode="exact", optimize=False))
    for step, other in zip(fused, plain, strict=True):
        assert step.keys() == other.keys() and len(step) > 3
        for tensor in step:
            torch.testing.assert_close(step[tensor], other[tensor], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "llama_int4", "deepseek_v2_int4"])
def test_declared_values_differ_by_roundings_at_most(programs: dict[str, Program], name: str) -> None:
    """Sums in another order flip a rounding now and then, and a flip travels: the spread of what the roundings
    themselves do (declared against exact) bounds it from above."""
    exact = run_steps(InterpreterRunner(programs[name], mode="exact"))
    fused = run_steps(InterpreterRunner(programs[name], mode="declared"))
    plain = run_steps(InterpreterRunner(programs[name], mode="declared", optimize=False))
    for true, step, other in zip(exact, fused, plain, strict=True):
        difference = (step["logits"] - other["logits"]).abs().max()
        rounding = (other["logits"] - true["logits"]).abs().max()
        assert difference <= 1.5 * rounding and rounding > 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "llama_int4", "deepseek_v2_int4", "llama_int4_plain"])
def test_fast_values_differ_by_bf16_roundings_at_most(programs: dict[str, Program], name: str) -> None:
    exact = run_steps(InterpreterRunner(programs[name], mode="exact"))
    fast = run_steps(InterpreterRunner(programs[name], mode="fast"))
    for true, step in zip(exact, fast, strict=True):
        spread = true["logits"].std(-1)
        error = (step["logits"] - true["logits"]).abs().amax(-1) / spread
        assert bool((error <= FAST_MARGIN / 2).all()) and bool((error > 0).any())  # so that no clear winner loses
        best, second = true["logits"].topk(2, dim=-1).values.unbind(-1)
        other = step["logits"].argmax(-1) != true["logits"].argmax(-1)
        assert bool(((best - second)[other] < FAST_MARGIN * spread[other]).all())


def test_inner_tensors_can_be_tapped_although_they_are_fused_away(programs: dict[str, Program]) -> None:
    taps = ("layers.1.input_layernorm.ratio", "layers.1.attention.query.rotary", "layers.0.output", "mask.allowed")
    fused = run_steps(InterpreterRunner(programs["llama"], mode="exact"), taps)
    plain = run_steps(InterpreterRunner(programs["llama"], mode="exact", optimize=False), taps)
    for step, other in zip(fused, plain, strict=True):
        for tap in taps:
            torch.testing.assert_close(step[tap], other[tap], rtol=1e-4, atol=1e-5)


def norm_like(*, op: str = "AVG", axis: int = 1, divide: bool = True, wide: str = "float32") -> Callable[[Any], Any]:
    def build(g: Any) -> dict[str, Any]:
        x = g.cast("wide", feed(g, "x", "float16", (-1, 4)), wide)
        mean = g.reduce("mean", g.product("square", x, x), op, axis, keep=True)
        root = g.unary("root", g.sum("variance", mean, g.number("eps", [[1e-5]], wide)), "SQRT")
        ratio = g.elementwise("ratio", x, root, "DIV" if divide else "PROD")
        return {"y": g.product("y", g.cast("normal", ratio, "float16"), g.number("weight", [[1, 2, 3, 4]], "float16"))}

    return build


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, 1), ({"op": "SUM"}, 0), ({"axis": 0}, 0), ({"divide": False}, 0), ({"wide": "float16"}, 0)],
)
def test_only_a_whole_norm_is_a_norm(options: dict[str, Any], found: int) -> None:
    program = read(norm_like(**options))
    assert kinds(program)["rms_norm"] == found
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half()
    fused, plain = (Interpreter(program, mode="declared", optimize=o).run({"x": x})["y"] for o in (True, False))
    assert torch.equal(fused, plain)


def test_the_rms_norm_is_right() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * np.array([1, 2, 3, 4])
    result = run(read(norm_like()), x=torch.from_numpy(x).float())["y"]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)


def test_a_mask_per_head_keeps_the_general_attention() -> None:
    def build(g: Any) -> dict[str, Any]:
        q, k = feed(g, "q", "float32", (-1, 4, -1, 8)), feed(g, "k", "float32", (-1, 2, -1, 8))
        mask = feed(g, "mask", "bool", (-1, 4, -1, -1))
        return {"y": g.attention("y", q, k, k, mask, decomposable=True)}

    program = read(build)
    assert kinds(program)["attention"] == 1
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    mask = torch.rand(1, 4, 3, 5, generator=generator) > 0.5
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1), attn_mask=mask, scale=1.0
    )
    torch.testing.assert_close(run(program, q=q, k=k, mask=mask)["y"], expected)
