"""A model over several processes, as the executor sees it: one runner, with the tokens of a single process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CompatibilityError
from pipeline.evaluation.forward import read_program
from pipeline.network.spec import NetworkSpec
from pipeline.runtime.errors import RunnerError
from pipeline.runtime.executor import Executor
from pipeline.runtime.limits import Limits
from pipeline.runtime.rank_group import RankGroup
from pipeline.runtime.request import Request
from pipeline.runtime.runner import InterpreterRunner, RankInterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step
from pipeline.sharding import Parallel, Rank
from pipeline.triton.processes import is_alive

BLOCK_SIZE, BLOCKS = 16, 24
PROMPTS = [[5, 17, 42, 9], list(range(3, 40)), [7, 7, 30]]


def make_spec(**changes: Any) -> NetworkSpec:
    return NetworkSpec(dtype="float16", max_seq_len=128, block_size=BLOCK_SIZE, **changes)


def make_runner(rank: Rank, checkpoint: str) -> RankInterpreterRunner:
    """What every rank's process calls."""
    folder = CheckpointFolder.open(Path(checkpoint))
    program = read_program(folder, folder.architecture, make_spec(rank=rank))
    return RankInterpreterRunner(program, rank, mode="exact")


def refuse(rank: Rank, checkpoint: str) -> RankInterpreterRunner:
    if rank.index == 1:
        raise CompatibilityError("no room for its weights")
    return make_runner(rank, checkpoint)


def start(checkpoint: Path, parallel: Parallel, maker: str = "make_runner") -> RankGroup:
    return RankGroup(parallel, f"{__name__}:{maker}", {"checkpoint": str(checkpoint)})


@pytest.fixture(scope="module")
def alone(converted_llama: Path) -> InterpreterRunner:
    folder = CheckpointFolder.open(converted_llama)
    return InterpreterRunner(read_program(folder, folder.architecture, make_spec()), mode="exact")


def plan(prompt: list[int], blocks: list[int]) -> dict[str, Any]:
    chunk = Chunk(tokens=prompt, start=0, block_table=blocks)
    return plan_step([chunk], block_size=BLOCK_SIZE, num_blocks=BLOCKS).inputs


def answer(runner: Any) -> list[list[int]]:
    """Greedy tokens of all prompts, in flight together."""
    limits = Limits(num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_seq_len=128, max_batch_size=4, max_num_tokens=64)
    executor = Executor(runner, limits, vocab_size=512)
    handles = [executor.submit(Request(input_ids=tuple(prompt), max_tokens=10, end_id=-1)) for prompt in PROMPTS]
    while executor.step():
        pass
    executor.check()
    return [handle.result(0).outputs[0].tokens for handle in handles]


@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2)], ids=["tp2", "pp2"])
def test_the_ranks_are_one_runner(converted_llama: Path, alone: InterpreterRunner, parallel: Parallel) -> None:
    with start(converted_llama, parallel) as group:
        pids = group.pids
        assert answer(group) == answer(alone)
        move_blocks(group)
    assert not any(map(is_alive, pids))
    assert not torch.distributed.is_initialized()


def move_blocks(group: RankGroup) -> None:
    group.allocate(BLOCKS)
    group.step(plan(PROMPTS[1], [1, 2, 3]))
    content = group.read_blocks([1, 2])
    assert {name.partition(".")[0] for name in content} == {"0", "1"}
    assert all(torch.count_nonzero(pool) for pool in content.values())
    group.copy_blocks([(1, 5), (2, 6)])
    assert same(group.read_blocks([5, 6]), content)
    group.zero_blocks([5])
    assert not any(torch.count_nonzero(pool) for pool in group.read_blocks([5]).values())
    group.write_blocks([7, 8], content)
    assert same(group.read_blocks([7, 8]), content)
    group.allocate(BLOCKS)
    assert not any(torch.count_nonzero(pool) for pool in group.read_blocks([1]).values())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_rank_that_cannot_start_is_named(converted_llama: Path) -> None:
    with pytest.raises(RunnerError, match="rank 1 failed: CompatibilityError: no room for its weights"):
        start(converted_llama, Parallel(tensor=2), "refuse")


def test_a_rank_that_dies_ends_the_group(converted_llama: Path) -> None:
    """And is named, not one of those that lose it in the middle of a step."""
    with start(converted_llama, Parallel(tensor=2, pipeline=2)) as group:
        group.allocate(BLOCKS)
        pids = group.pids
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RunnerError, match="rank 3 ended with status -9"):
            group.step(plan([1, 2], [1]))
        with pytest.raises(RunnerError, match="rank 3 ended with status -9, and the other ranks with it"):
            group.allocate(BLOCKS)
        assert not any(map(is_alive, pids))


def test_a_step_that_one_rank_cannot_compute_is_not_waited_for(converted_llama: Path) -> None:
    with start(converted_llama, Parallel(tensor=2)) as group:
        group.allocate(BLOCKS)
        inputs = plan([1, 2], [1])
        with pytest.raises(RunnerError, match=r"rank 1 failed: \w*Error"):
            group.step({**inputs, "input_ids": inputs["input_ids"].astype(np.float32)})
        assert not any(map(is_alive, group.pids))
