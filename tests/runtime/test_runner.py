from pathlib import Path

import pytest
import torch

from pipeline.errors import CompatibilityError
from pipeline.runtime.runner import InterpreterRunner, Runner
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.network import models
from tests.runtime import runners


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    return models.load(fixtures.llama(tmp_path_factory.mktemp("llama") / "m", dtype="float32", num_hidden_layers=2))


@pytest.fixture(scope="module", params=runners.KINDS)
def made(
    request: pytest.FixtureRequest, model: models.Model, tmp_path_factory: pytest.TempPathFactory
) -> InterpreterRunner:
    return runners.make_runner(request.param, model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def runner(made: InterpreterRunner) -> InterpreterRunner:
    made.allocate(5)
    return made


def step(runner: Runner, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
    chunk = Chunk(tokens=tokens, start=start, block_table=table, logits="last")
    return runner.step(plan_step([chunk], block_size=8, num_blocks=5).inputs)[0]


def test_pools_are_those_of_the_network_and_zero(runner: InterpreterRunner) -> None:
    assert sorted(runner.pools) == ["k_pool_0", "k_pool_1", "v_pool_0", "v_pool_1"]
    for pool in runner.pools.values():
        assert pool.shape == (5, 2, 8, 32) and pool.dtype == torch.float32 and not pool.any()


def test_pools_have_the_type_of_the_mode(tmp_path: Path) -> None:
    model = models.load(fixtures.llama(tmp_path / "m", num_hidden_layers=1))
    runner = InterpreterRunner(model.program(), mode="declared")
    runner.allocate(2)
    assert {pool.dtype for pool in runner.pools.values()} == {torch.bfloat16}


def test_a_step_writes_its_blocks_only(runner: InterpreterRunner) -> None:
    logits = step(runner, [5, 6, 7], 0, [3])
    assert logits.dtype == torch.float32 and logits.shape == (512,)
    for pool in runner.pools.values():
        assert pool[3, :, :3].any(dim=-1).all()
        assert not pool[3, :, 3:].any() and not pool[[0, 1, 2, 4]].any()


def test_a_sequence_goes_on_in_copied_blocks(runner: InterpreterRunner) -> None:
    step(runner, list(range(5, 15)), 0, [3, 1])
    runner.copy_blocks([(3, 2), (1, 4)])
    assert torch.equal(step(runner, [9], 10, [2, 4]), step(runner, [9], 10, [3, 1]))


def test_copies_read_before_they_write(runner: InterpreterRunner) -> None:
    for block in range(5):
        runner.write_blocks([block], {name: torch.full((1, 2, 8, 32), float(block)) for name in runner.pools})
    runner.copy_blocks([(1, 2), (2, 1)])
    assert [runner.pools["k_pool_1"][block].mean().item() for block in (1, 2)] == [2, 1]


def test_blocks_can_leave_and_come_back_elsewhere(runner: InterpreterRunner) -> None:
    step(runner, list(range(5, 15)), 0, [3, 1])
    content = runner.read_blocks([3, 1])
    before = step(runner, [9], 10, [3, 1])
    runner.zero_blocks([3, 1])
    assert not any(pool.any() for pool in runner.pools.values())
    runner.write_blocks([2, 4], content)
    assert torch.equal(step(runner, [9], 10, [2, 4]), before)


def test_zeroed_blocks_forget_what_was_not_finite(runner: InterpreterRunner) -> None:
    clean = step(runner, [5, 6], 0, [1])
    for pool in runner.pools.values():
        pool[1, :, 5] = torch.nan  # a masked row of the same block
    assert not step(runner, [5, 6], 0, [1]).isfinite().all()
    runner.zero_blocks([1])
    assert torch.equal(step(runner, [5, 6], 0, [1]), clean)


def test_allocating_again_starts_over(runner: InterpreterRunner) -> None:
    step(runner, [5], 0, [1])
    runner.allocate(9)
    assert all(len(pool) == 9 and not pool.any() for pool in runner.pools.values())


def test_a_step_of_several_sequences_gives_each_its_own_logits(runner: InterpreterRunner) -> None:
    """Also where it is padded, as three are."""
    tables = [[3], [1], [4]]
    for n, table in enumerate(tables):
        step(runner, list(range(5, 7 + n)), 0, table)
    alone = [step(runner, [9 + n], 2 + n, table) for n, table in enumerate(tables)]
    chunks = [Chunk(tokens=[9 + n], start=2 + n, block_table=table) for n, table in enumerate(tables)]
    together = runner.step(plan_step(chunks, block_size=8, num_blocks=5).inputs)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-2, atol=1e-2)  # TensorRT multiplies in TF32


def test_one_block_is_not_enough(runner: InterpreterRunner) -> None:
    with pytest.raises(CompatibilityError, match="block 0 is padding"):
        runner.allocate(1)


def test_a_slice_without_logits_is_refused(tmp_path: Path, model: models.Model) -> None:
    with pytest.raises(CompatibilityError, match="gives no logits"):
        InterpreterRunner(model.program(layers=(0, 1)), mode="exact")


def test_taps_come_with_a_step(model: models.Model) -> None:
    runner = InterpreterRunner(model.program(), mode="exact")
    runner.allocate(5)
    chunk = Chunk(tokens=[5, 6, 7], start=0, block_table=[1], logits="last")
    inputs = plan_step([chunk], block_size=8, num_blocks=5).inputs
    outputs = runner.run(inputs, taps=["layers.1.output"])
    assert outputs["layers.1.output"].shape == (3, 128)
    assert outputs["logits"].shape == (1, 512)
