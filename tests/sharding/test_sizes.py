"""What a rank computes of each layer, worked out by hand for DeepSeek-V3's shapes."""

from __future__ import annotations

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.errors import CompatibilityError
from pipeline.sharding import Parallel, Rank, Sizes, local_sizes
from tests import fixtures
from tests.checkpoint.layouts.test_layout import V3


def test_a_rank_of_v3() -> None:
    """Experts by 4, each one's columns by 2; the latent is every rank's."""
    found = local_sizes(parse_architecture(V3), Rank(Parallel(tensor=8, pipeline=2, expert=4), 13))
    assert found == Sizes(
        heads=16,
        kv_heads=1,
        columns=18432 // 8,
        vocabulary=129280 // 8,
        experts=range(64, 128),
        expert_columns=1024,
        shared_columns=256,
    )


def test_a_rank_of_llama() -> None:
    found = local_sizes(parse_architecture(fixtures.LLAMA_CONFIG), Rank(Parallel(tensor=2), 1))
    assert (found.heads, found.kv_heads, found.columns, found.vocabulary) == (2, 1, 128, 256)
    assert (len(found.experts), found.expert_columns, found.shared_columns) == (0, 0, 0)


def test_what_does_not_divide() -> None:
    with pytest.raises(CompatibilityError, match="tensor sizes that would work: 1, 2"):
        local_sizes(parse_architecture(fixtures.LLAMA_CONFIG), Rank(Parallel(tensor=4), 1))
