"""Expert parallelism by the plugin moe_all_to_all: what one rank computes, over fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.network.spec import Lowering
from pipeline.sharding import Parallel
from tests import fixtures
from tests.network import models
from tests.network.ranks import Ranks
from tests.network.serving import prompts, serve

EP2, EP4, TP2_EP2 = Parallel(2, expert=2), Parallel(4, expert=4), Parallel(4, expert=2)
PLUGIN = Lowering(moe_all_to_all="plugin")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_logits_of_all_ranks_are_those_of_one(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Prompts, single tokens and both at once; steps of fewer tokens than ranks, ranks that no token goes to."""
    write = {"v2": fixtures.deepseek_v2, "v3": fixtures.deepseek_v3}[name]
    model = models.load(write(tmp_path / "hf", dtype="float32"))
    sequences = prompts(model.architecture.vocab_size)
    whole = serve(model.program(), sequences=sequences)
    for parallel in (EP2, EP4, TP2_EP2):
        programs = [model.program(rank=rank, lowering=PLUGIN) for rank in parallel.ranks]
        for found in ranks.serve(parallel, programs, sequences=sequences):
            for one, expected in zip(found, whole, strict=True):
                apart = (one["logits"] - expected["logits"]).abs().max()
                print(name, parallel, float(apart))
                assert apart < TOLERANCE
