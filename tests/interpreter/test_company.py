"""In exact mode each row comes out bit for bit the same in any company: whatever other rows there are, and how many.

That is what lets a served request give the tokens it gives alone, so equality here is of bits, never of closeness.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.interpreter import Interpreter
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.interpreter.networks import feed, read
from tests.network import models

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 256, 700)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def companies(total: int, seed: int) -> Iterator[torch.Tensor]:
    """Some of `total` rows in random order, of every size."""
    generator = torch.Generator().manual_seed(seed)
    for size in SIZES:
        yield torch.randperm(total, generator=generator)[: min(size, total)]


def check_rows(build: Callable[[Any], dict[str, Any]], x: torch.Tensor, axis: int = 0) -> None:
    """Every company's rows against those of all rows at once."""
    interpreter = Interpreter(read(build), mode="exact")
    whole = interpreter.run({"x": x})["y"]
    for chosen in companies(x.shape[axis], seed=x.shape[-1]):
        part = interpreter.run({"x": x.index_select(axis, chosen).contiguous()})["y"]
        assert torch.equal(part, whole.index_select(axis, chosen)), f"{len(chosen)} rows"


@pytest.mark.parametrize(("width", "out"), [(8, 5), (96, 40), (256, 768), (1536, 96), (2816, 64), (5000, 16)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_a_constant(width: int, out: int, transposed: bool) -> None:
    weight = draw(*((out, width) if transposed else (width, out)), scale=0.05).numpy()

    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, width))
        return {"y": g.matmul("y", x, g.number("weight", weight, "float32"), transpose=transposed)}

    check_rows(build, draw(1000, width, seed=1))


def test_products_with_a_constant_per_head() -> None:
    weight = draw(4, 48, 160, scale=0.1).numpy()

    def build(g: Any) -> dict[str, Any]:
        return {"y": g.matmul("y", feed(g, "x", "float32", (4, -1, 48)), g.number("weight", weight, "float32"))}

    check_rows(build, draw(4, 700, 48), axis=1)


@pytest.mark.parametrize("width", [16, 24, 40, 100, 256, 1000])
def test_what_works_row_by_row(width: int) -> None:
    """Activation, norm, softmax and sums: their vectors must not reach from one row into the next."""

    def build(g: Any) -> dict[str, Any]:
        x = feed(g, "x", "float32", (-1, width))
        silu = g.product("silu", x, g.sigmoid("sigmoid", x))
        mean = g.reduce("mean", g.product("square", silu, silu), "AVG", 1, keep=True)
        root = g.unary("root", g.sum("variance", mean, g.number("eps", [[1e-5]], "float32")), "SQRT")
        ratio = g.elementwise("ratio", silu, root, "DIV")
        normal = g.product("normal", ratio, g.number("weight", draw(1, width, seed=3).numpy(), "float32"))
        return {"y": g.sum("y", normal, g.softmax("softmax", x, 1))}

    check_rows(build, draw(1000, width, seed=2, scale=3.0))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (8, 2, 64), (3, 1, 160)])
def test_attention_in_any_batch_and_padding(heads: int, kv_heads: int, width: int) -> None:
    """One sequence's rows: alone, in chunks, beside longer and shorter ones, before padded keys."""

    def build(g: Any) -> dict[str, Any]:
        q = feed(g, "q", "float32", (-1, heads, -1, width))
        k, v = (feed(g, name, "float32", (-1, kv_heads, -1, width)) for name in "kv")
        mask = feed(g, "mask", "bool", (-1, 1, -1, -1))
        return {"y": g.attention("y", q, k, v, mask, decomposable=True)}

    interpreter = Interpreter(read(build), mode="exact")
    length = 90
    q, k, v = (draw(1, n, length, width, seed=s) for s, n in enumerate((heads, kv_heads, kv_heads)))

    def run(batch: int, at: int, first: int, last: int, queries: int, keys: int, seed: int) -> torch.Tensor:
        """Rows first … last of the sequence as entry `at` of a batch of random others, padded to the sizes given."""
        feeds = {
            "q": draw(batch, heads, queries, width, seed=seed),
            "k": draw(batch, kv_heads, keys, width, seed=seed + 1),
            "v": draw(batch, kv_heads, keys, width, seed=seed + 2),
        }
        place = torch.randint(keys, (batch, 1, queries, 1), generator=torch.Generator().manual_seed(seed))
        place[at, 0, : last - first, 0] = torch.arange(first, last)
        feeds["q"][at, :, : last - first] = q[0, :, first:last]
        feeds["k"][at, :, :last], feeds["v"][at, :, :last] = k[0, :, :last], v[0, :, :last]
        feeds["mask"] = torch.arange(keys).reshape(1, 1, 1, -1) <= place
        return interpreter.run(feeds)["y"][at, :, : last - first]

    whole = run(1, 0, 0, length, length, length, 0)
    random = np.random.default_rng(width)
    for seed in range(150):
        batch, first = int(random.integers(1, 9)), int(random.integers(0, length))
        last = int(random.integers(first + 1, length + 1)) if seed % 3 else first + 1
        queries = last - first + int(random.integers(0, 20)) * (seed % 2)
        keys = last + int(random.integers(0, 200)) * (seed % 5 > 0)
        part = run(batch, int(random.integers(batch)), first, last, queries, keys, seed)
        assert torch.equal(part, whole[:, first:last]), (batch, first, last, queries, keys)


def load_int4(folder: Path) -> models.Model:
    pattern = r"mlp\.(gate|up|down)_proj|experts|o_proj"
    return models.load_int4(fixtures.deepseek_v2, folder, pattern=pattern, group=32, prescale="each", dtype="float16")


MODELS: dict[str, Callable[[Path], models.Model]] = {
    "llama": lambda folder: models.load(fixtures.llama(folder)),
    "deepseek_v2": lambda folder: models.load(fixtures.deepseek_v2(folder)),
    "deepseek_v2_wide": lambda folder: models.load(fixtures.deepseek_v2(folder, moe_intermediate_size=512)),
    "deepseek_v2_int4": load_int4,
}


ONLY_DENSE = ("llama", "deepseek_v2_wide")
CASES = [(name, moe) for name in MODELS for moe in ("dense", "gather") if moe == "dense" or name not in ONLY_DENSE]


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize(("name", "moe"), CASES)
def test_a_sequence_in_any_mix_of_steps(tmp_path: Path, name: str, block_size: int, moe: str) -> None:
    """The logits of every position of a sequence, cut into random chunks, in random company."""
    program = MODELS[name](tmp_path / "m").program(block_size=block_size, moe=moe)
    runner = InterpreterRunner(program, mode="exact")
    random = np.random.default_rng(5)
    length, blocks = 40, 64
    tokens = random.integers(2, 512, length)

    def run(sizes: list[int], company: bool) -> torch.Tensor:
        runner.allocate(blocks)
        table = random.permutation(np.arange(1, blocks))
        per = -(-length // block_size)
        mine, others = table[:per], table[per:]
        done, rows = 0, []
        for size in sizes:
            chunks = [Chunk(tokens=tokens[done : done + size], start=done, block_table=mine, logits="all")]
            free = others.copy()
            for _ in range(int(random.integers(0, 7)) if company else 0):
                take = -(-int(random.integers(1, 30)) // block_size)
                other = random.integers(2, 512, int(random.integers(1, take * block_size + 1))).astype(int)[:30]
                chunks.append(Chunk(tokens=other, start=0, block_table=free[:take], logits="last"))
                free = free[take:]
            order = random.permutation(len(chunks))
            plan = plan_step([chunks[i] for i in order], block_size=block_size, num_blocks=blocks)
            logits = runner.step(plan.inputs)
            owner = torch.from_numpy(plan.logit_owner)
            own = owner[:, 0] == int(np.flatnonzero(order == 0)[0])
            rows.append(logits[: len(owner)][own][owner[own, 1].argsort()].clone())
            done += size
        return torch.cat(rows)

    whole = run([length], company=False)
    assert len(whole) == length and bool(whole.isfinite().all())
    assert torch.equal(run([1] * length, company=False), whole)
    for _ in range(8):
        cuts = np.sort(random.choice(np.arange(1, length), int(random.integers(0, 12)), replace=False))
        sizes = np.diff([0, *cuts, length]).tolist()
        assert torch.equal(run(sizes, company=True), whole), sizes
