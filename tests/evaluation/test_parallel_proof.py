"""verify's proof of a parallel model: the ranks' own networks, in processes of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.proof import Gates
from pipeline.evaluation.conversion_proof import ConversionProof
from pipeline.evaluation.forward import read_program
from pipeline.evaluation.judgement import judge_proofs
from pipeline.evaluation.network_findings import NetworkProof
from pipeline.evaluation.network_proof import prove_network
from pipeline.evaluation.parallel_proof import RankNetworks
from pipeline.evaluation.schedule import Schedule, make_sequences
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.progress import SILENT
from pipeline.sharding import Parallel, Rank
from tests import fixtures
from tests.evaluation.support import convert

PROMPTS = ((5, 9, 301, 44, 7, 8, 120, 66, 31, 250, 18), (400, 3, 77))
SPEC = NetworkSpec(dtype="float32", max_seq_len=256, block_size=4)
EP2 = Parallel(tensor=2, expert=2)
BOUNDS = Gates()


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("v2")
    return convert(fixtures.deepseek_v2(folder / "hf", num_hidden_layers=2), folder / "engine")


class Wrong(RankNetworks):
    """Ranks that agree on nothing but the shape."""

    def run(self, schedule: Schedule, segments: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        for step in schedule.steps:
            yield torch.ones(len(step.inputs["slot_ids"]), self.checkpoint.architecture.vocab_size)


def prove(built: CheckpointFolder, ranks: RankNetworks, segments: Sequence[tuple[int, int]]) -> NetworkProof:
    sequences = make_sequences(PROMPTS, decode_tokens=2, architecture=built.architecture, max_seq_len=128)
    return prove_network(
        built,
        built.config,
        built.architecture,
        SPEC,
        sequences,
        prefill_chunk=4,
        router_margin=1e-5,
        segments=segments,
        progress=SILENT,
        ranks=ranks,
    )


def judge(proof: NetworkProof, bounds: Gates = BOUNDS) -> dict[str, bool | None]:
    conversion = ConversionProof(tensors=1, elements=1, differing={}, clipped=0)
    return {gate.name: gate.passed for gate in judge_proofs(bounds, conversion, proof)}


@pytest.mark.parametrize(
    ("parallel", "segments"), [(EP2, [(0, 1), (1, 2)]), (Parallel(pipeline=2), [(0, 2)])], ids=["sliced", "whole"]
)
def test_ranks_that_are_right(
    latent: CheckpointFolder, parallel: Parallel, segments: Sequence[tuple[int, int]]
) -> None:
    proof = prove(latent, RankNetworks(checkpoint=latent, spec=SPEC, parallel=parallel), segments)
    assert proof.ranks is not None and proof.ranks.world == 2
    assert 0 <= proof.ranks.max_difference < 1e-5 and proof.ranks.max_logit_error < 2e-5
    gates = judge(proof)
    assert gates["ranks_exact"] and gates["ranks_agree"]


def test_both_ways_of_exchange_are_proved(latent: CheckpointFolder) -> None:
    """One rank alone exchanges nothing, so that only the ranks together say that the lowerings agree."""
    spec = replace(SPEC, lowering=Lowering(moe_all_to_all="plugin"))
    proof = prove(latent, RankNetworks(checkpoint=latent, spec=spec, parallel=EP2), [(0, 2)])
    for found in (proof.ranks, proof.native_ranks):
        assert found is not None and found.max_difference < 1e-5 and found.max_logit_error < 2e-5
    assert judge(proof)["native_ranks"]


def test_what_fp8_rows_change_is_measured_and_bounded(latent: CheckpointFolder) -> None:
    """The proof of equality leaves their rounding out; one routed layer rounds each row once."""
    spec = replace(SPEC, lowering=Lowering(moe_all_to_all="plugin"), expert_payload="fp8")
    ranks = RankNetworks(checkpoint=latent, spec=spec, parallel=EP2)
    proof = prove(latent, ranks, [(0, 2)])
    assert proof.ranks is not None and proof.ranks.max_difference < 1e-5
    assert proof.payload is not None and (proof.payload.kind, proof.payload.bound) == ("fp8", 2**-4)
    assert 1e-4 < proof.payload.error < proof.payload.bound
    assert judge(proof)["network_payload"]
    tight = Gates(network_payload=proof.payload.error / 2)
    assert judge(proof, tight)["network_payload"] is False and judge(proof, tight)["ranks_exact"]
    wrong = Wrong(checkpoint=latent, spec=spec, parallel=EP2)
    assert judge(replace(proof, payload=prove(latent, wrong, [(0, 2)]).payload))["network_payload"] is False
    assert prove(latent, replace(ranks, spec=replace(spec, expert_payload="model")), [(0, 2)]).payload is None


def test_ranks_that_are_wrong(latent: CheckpointFolder) -> None:
    proof = prove(latent, Wrong(checkpoint=latent, spec=SPEC, parallel=EP2), [(0, 2)])
    assert proof.ranks is not None and math.isfinite(proof.ranks.max_difference)
    gates = judge(proof)
    assert gates["network_exact"] is True
    assert gates["ranks_exact"] is gates["ranks_agree"] is False


def test_each_rank_has_a_digest(latent: CheckpointFolder, tmp_path: Path) -> None:
    first, second = RankNetworks(checkpoint=latent, spec=SPEC, parallel=EP2).digests()
    assert first != second
    spec = NetworkSpec(dtype="float32", max_seq_len=256, block_size=4, rank=Rank(EP2, 1))
    assert read_program(latent, latent.architecture, spec).digest() == second
