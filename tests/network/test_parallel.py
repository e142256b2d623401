"""Networks of several ranks, one process each, against the network of one: the same logits on every rank.

What is left of the difference is the order of sums, as in test_against_transformers.py, whose bound this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.sharding import Parallel
from tests import fixtures
from tests.network import models
from tests.network.ranks import Ranks
from tests.network.serving import prompts, serve

TOLERANCE = 1e-5
TP2, TP4, PP2 = Parallel(tensor=2), Parallel(tensor=4), Parallel(pipeline=2)
EP2, EP4, TP2_EP2 = Parallel(2, expert=2), Parallel(4, expert=4), Parallel(4, expert=2)
TP2_PP2 = Parallel(tensor=2, pipeline=2)
DENSE, ROUTED = (TP2, TP4, PP2, TP2_PP2), (TP2, TP4, PP2, EP2, EP4, TP2_EP2)
HEADS: dict[str, Any] = {"num_key_value_heads": 4}

CASES: dict[str, tuple[Callable[[Path], models.Model], tuple[Parallel, ...]]] = {
    "llama": (lambda path: models.load(fixtures.llama(path, dtype="float32", **HEADS)), DENSE),
    "v2": (lambda path: models.load(fixtures.deepseek_v2(path, dtype="float32")), ROUTED),
    "v3": (lambda path: models.load(fixtures.deepseek_v3(path, dtype="float32")), ROUTED),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("case", CASES)
def test_logits_of_all_ranks_are_those_of_one(case: str, ranks: Ranks, tmp_path: Path) -> None:
    write, parallels = CASES[case]
    model = write(tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    whole = serve(model.program(), sequences=sequences)
    for parallel in parallels:
        programs = [model.program(rank=rank) for rank in parallel.ranks]
        for rank, found in zip(parallel.ranks, ranks.serve(parallel, programs, sequences=sequences), strict=True):
            for one, expected in zip(found, whole, strict=True):
                if rank.pipeline < parallel.pipeline - 1:
                    assert not one
                else:
                    assert (one["logits"] - expected["logits"]).abs().max() < TOLERANCE
