"""What the plan says that ranks send each other, against the networks that send it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.engine.exchanges import Exchange, describe_layer, expect_sparse, pad, plan_exchanges, reduce_all
from pipeline.network.spec import Lowering
from pipeline.sharding import Parallel
from tests import fixtures
from tests.network import models

PLUGIN = Lowering(moe_all_to_all="plugin")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    """Three layers, the first of them dense."""
    return models.load(fixtures.deepseek_v2(tmp_path_factory.mktemp("v2") / "hf", dtype="float32"))


def count_in_networks(model: models.Model, parallel: Parallel, lowering: Lowering) -> Counter[str]:
    """Exchanges of one rank of each pipeline stage."""
    found = Counter[str]()
    for rank in parallel.ranks[:: parallel.tensor]:
        for node in model.program(rank=rank, lowering=lowering).nodes:
            found[node.attributes["op"] if node.kind == "dist_collective" else node.kind] += 1
    return found


@pytest.mark.parametrize("lowering", [Lowering(), PLUGIN], ids=["native", "plugin"])
@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(4, expert=2), Parallel(2, pipeline=3, expert=2)])
def test_the_plan_counts_what_networks_do(model: models.Model, parallel: Parallel, lowering: Lowering) -> None:
    found = count_in_networks(model, parallel, lowering)
    planned = {each.what: each for each in plan(model, parallel, lowering == PLUGIN) if each.used}
    assert planned.pop("all-reduce").count == found["all_reduce"] == 7
    if parallel.pipeline > 1:
        assert planned.pop("hidden states to the next stage").count == 2
    routed = 2 if parallel.expert > 1 else 0
    assert [each.count for each in planned.values()] == [routed] * bool(routed)
    by_plugin = routed if lowering == PLUGIN else 0
    assert (found["moe_dispatch"], found["moe_combine"]) == (by_plugin, by_plugin)
    assert found["all_to_all"] == 3 * (routed - by_plugin)  # rows, their experts, and back


def plan(model: models.Model, parallel: Parallel, by_plugin: bool, payload: str = "model") -> list[Exchange]:
    return list(plan_exchanges(model.architecture, "float16", parallel, payload=payload, by_plugin=by_plugin))


def test_one_gpu_sends_nothing(model: models.Model) -> None:
    assert plan(model, Parallel(), True) == []


def test_every_way_is_told_and_one_is_used(model: models.Model) -> None:
    """Each share of an expert's columns is exchanged among ranks of its own."""
    layer = describe_layer(model.architecture, "float16")
    assert (layer.experts, layer.chosen, layer.groups, layer.kept) == (16, 4, 4, 2)
    for by_plugin, payload, used in ((False, "model", 2), (True, "model", 0), (True, "fp8", 1)):
        reduced, *ways = plan(model, Parallel(4, expert=2), by_plugin, payload)
        assert (reduced.there, reduced.back, reduced.nbytes) == (reduce_all("float16", 128, 4), 0, 7 * 2 * 3 * 2 * 128)
        wanted = [expect_sparse(layer, 2, "model"), expect_sparse(layer, 2, "fp8"), pad(layer, 2)]
        assert [(way.there, way.back) for way in ways] == [(2 * there, 2 * back) for there, back in wanted]
        assert [way.used for way in ways] == [index == used for index in range(3)]
        assert all(way.nbytes == 2 * (way.there + way.back) for way in ways)


def test_hidden_states_go_on_from_every_rank_of_a_stage(model: models.Model) -> None:
    _, handed = plan(model, Parallel(2, pipeline=3), False)
    assert (handed.count, handed.there, handed.nbytes) == (2, 2 * 2 * 128, 2 * 2 * 2 * 128)


def test_experts_drawn_from_all_where_groups_do_not_count(tmp_path: Path) -> None:
    model = models.load(fixtures.deepseek_v2(tmp_path / "hf", topk_method="greedy", dtype="float32"))
    layer = describe_layer(model.architecture, "bfloat16")
    assert (layer.groups, layer.kept) == (1, 1)
