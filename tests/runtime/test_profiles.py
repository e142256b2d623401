import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError
from pipeline.runtime.profiles import (
    StepProfile,
    batch_sizes,
    choose_profile,
    measure,
    pad_generation,
    read_profiles,
    round_batch,
    round_width,
    split_rows,
)
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.network import models
from tests.runtime.stand_in import describe

LIMITS = BuildLimits(
    max_seq_len=128,
    max_batch_size=12,
    max_num_tokens=24,
    generation=(Rectangle(batch=12, length=32), Rectangle(batch=4, length=128)),
    block_size=8,
    max_blocks=100,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    folder = tmp_path_factory.mktemp("profiles") / "m"
    return models.load(fixtures.llama(folder, dtype="float32", num_hidden_layers=1))


@pytest.fixture(scope="module")
def profiles(model: models.Model) -> tuple[StepProfile, ...]:
    return read_profiles(describe(model, LIMITS).profiles)


def plan(*chunks: tuple[int, int], **options: Any) -> dict[str, np.ndarray]:
    """Chunks of (tokens, start), each with blocks of its own."""
    made, block = [], 1
    for count, start in chunks:
        width = -(-(start + count) // 8)
        made.append(Chunk(tokens=[5 + block] * count, start=start, block_table=range(block, block + width), **options))
        block += width
    return plan_step(made, block_size=8, num_blocks=100).inputs


@pytest.mark.parametrize(
    ("chunks", "name"),
    [
        ([(1, 0)], "generation 12 x 32"),
        ([(1, 31)] * 12, "generation 12 x 32"),
        ([(1, 32)] * 3, "generation 4 x 128"),
        ([(1, 127), (1, 3)], "generation 4 x 128"),
        ([(2, 0)], "context"),
        ([(1, 60), (5, 3)], "context"),
    ],
)
def test_a_step_runs_where_it_fits(profiles: tuple[StepProfile, ...], chunks: Any, name: str) -> None:
    assert choose_profile(profiles, measure(plan(*chunks))).name == name


@pytest.mark.parametrize("chunks", [[(1, 1)] * 13, [(1, 40)] * 5, [(25, 0)], [(9, 120)]])
def test_a_step_that_fits_nowhere_says_what_would(profiles: tuple[StepProfile, ...], chunks: Any) -> None:
    sizes = measure(plan(*chunks))
    with pytest.raises(CompatibilityError) as error:
        choose_profile(profiles, sizes)
    assert f"T={sizes['T']} B={sizes['B']} Q={sizes['Q']} MB={sizes['MB']} NB=100" in error.value.message
    assert "generation 12 x 32 T=12 B=12 Q=1 MB=4 NB=100" in error.value.message


def test_sizes_are_those_of_the_step() -> None:
    assert measure(plan((3, 9), (5, 0), logits="all")) == {"T": 8, "B": 2, "Q": 5, "MB": 2, "NB": 100, "N": 8}


def test_batches_come_in_few_sizes() -> None:
    assert batch_sizes(64, 64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert batch_sizes(1, 64) == (1,)
    assert batch_sizes(13, 2) == (1, 2, 3, 4, 6, 8, 10, 12, 13)
    for most, gap in [(100, 64), (1000, 8), (7, 1)]:
        sizes = batch_sizes(most, gap)
        assert sizes[-1] == most and all(0 < b - a <= gap for a, b in itertools.pairwise(sizes))
        assert all(size <= round_batch(size, most, gap) for size in range(1, most + 1))
        assert all(round_batch(n, most, 10**9) * 2 <= 3 * n or n < 2 for n in range(1, most + 1))


def test_widths_double() -> None:
    assert [round_width(width, 20) for width in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20)] == [1, 2, 4, 4, 8, 8, 16, 16, 20, 20]


@pytest.mark.parametrize(("count", "batch", "width"), [(1, 1, 2), (1, 4, 1), (2, 3, 8), (5, 6, 4), (4, 12, 4)])
def test_padding_changes_no_logits_and_no_block(model: models.Model, count: int, batch: int, width: int) -> None:
    """Bit for bit, with the interpreter: what is written, too, but for block 0."""
    rng = random.Random(count)
    prompts = [[rng.randrange(2, 512) for _ in range(rng.randrange(1, 8 * min(width, 2)))] for _ in range(count)]
    tables = [[1 + 2 * i, 2 + 2 * i] for i in range(count)]
    rng.shuffle(tables)
    runner = InterpreterRunner(model.program(max_seq_len=128), mode="exact")
    runner.allocate(100)
    chunks = [Chunk(tokens=p, start=0, block_table=t) for p, t in zip(prompts, tables, strict=True)]
    runner.step(plan_step(chunks, block_size=8, num_blocks=100).inputs)
    before = runner.read_blocks(range(100))
    steps = [Chunk(tokens=[7], start=len(p), block_table=t) for p, t in zip(prompts, tables, strict=True)]
    inputs = plan_step(steps, block_size=8, num_blocks=100).inputs
    expected, after = runner.step(inputs), runner.read_blocks(range(1, 100))
    runner.write_blocks(range(100), before)
    padded = pad_generation(inputs, batch=batch, width=max(width, inputs["block_tables"].shape[1]))
    assert measure(padded) | {"MB": 0} == {"T": batch, "B": batch, "Q": 1, "MB": 0, "NB": 100, "N": batch}
    assert torch.equal(runner.step(padded)[:count], expected)
    assert all(map(torch.equal, runner.read_blocks(range(1, 100)).values(), after.values()))
    assert runner.pools["k_pool_0"][0].isfinite().all()


def test_logits_are_had_in_parts() -> None:
    inputs = plan((9, 0), logits="all")
    parts = split_rows(inputs, 4)
    assert [len(part["logit_rows"]) for part in parts] == [4, 4, 1]
    assert np.array_equal(np.concatenate([part["logit_rows"] for part in parts]), inputs["logit_rows"])
    assert all(part["input_ids"] is inputs["input_ids"] for part in parts)
