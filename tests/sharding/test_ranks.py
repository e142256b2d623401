"""Ranks against TensorRT-LLM's Mapping (tensorrt_llm/mapping.py, 1.2): tp_rank, pp_rank, moe_tp_rank, moe_ep_rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.errors import CompatibilityError
from pipeline.sharding import Parallel, Rank, experts, layers
from tests import fixtures


def _architecture(tmp_path: Path, write: Any = fixtures.deepseek_v2, **options: Any) -> Architecture:
    return parse_architecture(json.loads((write(tmp_path / "hf", **options) / "config.json").read_text()))


def test_ranks_are_numbered_stage_by_stage() -> None:
    ranks = Parallel(tensor=4, pipeline=2, expert=2).ranks
    assert [rank.index for rank in ranks] == list(range(8))
    assert [rank.pipeline for rank in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank.tensor for rank in ranks] == [0, 1, 2, 3] * 2
    # moe_ep_rank = tp_rank % moe_ep_size, moe_tp_rank = tp_rank // moe_ep_size
    assert [rank.moe_expert for rank in ranks] == [0, 1, 0, 1] * 2
    assert [rank.moe_tensor for rank in ranks] == [0, 0, 1, 1] * 2
    assert ranks[6].tensor_group == (4, 5, 6, 7)
    assert [rank.expert_group for rank in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]


@pytest.mark.parametrize(("num_layers", "stages"), [(3, 1), (4, 2), (61, 8), (7, 7)])
def test_layers_are_spread_as_array_split_does(num_layers: int, stages: int, tmp_path: Path) -> None:
    architecture = _architecture(tmp_path, fixtures.llama, num_hidden_layers=2)
    object.__setattr__(architecture, "num_layers", num_layers)
    parallel = Parallel(tensor=2, pipeline=stages)
    expected = [(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(num_layers), stages)]
    assert [layers(architecture, Rank(parallel, 2 * stage + 1)) for stage in range(stages)] == expected


def test_experts_are_spread_over_their_group(tmp_path: Path) -> None:
    architecture = _architecture(tmp_path)
    found = [experts(architecture, rank) for rank in Parallel(tensor=4, expert=2).ranks]
    assert found == [range(8), range(8, 16), range(8), range(8, 16)]


def test_what_is_no_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match=r"expert parallel size 4 does not divide tensor .*") as caught:
        Parallel(tensor=6, expert=4)
    assert "1, 2, 3, 6" in caught.value.hint
    with pytest.raises(CompatibilityError, match=r"must be positive"):
        Parallel(tensor=0)
    with pytest.raises(CompatibilityError, match=r"rank 4 is none of 4"):
        Rank(Parallel(tensor=2, pipeline=2), 4)
    with pytest.raises(CompatibilityError, match=r"pipeline parallel size 4 is more than .* 3 decoder layers"):
        layers(_architecture(tmp_path), Rank(Parallel(pipeline=4), 0))
