"""A model over several GPUs, held against a count tensor by tensor and against the whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import layout_for
from pipeline.engine.fit import fit_batches
from pipeline.engine.memory import Design, plan_memory
from pipeline.engine.split import shrink
from pipeline.engine.weights import estimate_weights
from pipeline.quantization.selection import Rules
from pipeline.sharding import Parallel, Rank, slice_source
from tests.engine.checkpoints import TINY_V2, write_engine_checkpoint
from tests.engine.test_memory import ROLES, V3_SIZES, limits
from tests.fixtures import LLAMA_CONFIG, V2_CONFIG

V2 = parse_architecture(V2_CONFIG | {"num_hidden_layers": 4, "torch_dtype": "float16"})
LLAMA = parse_architecture(LLAMA_CONFIG | {"num_hidden_layers": 4})
V3 = parse_architecture(V3_SIZES)
RULES = Rules(method="rtn", include=ROLES)
ROUTED_LAYERS = 58
A100 = 80 << 30


def _weights(architecture: Architecture, index: int = 0, **sizes: int) -> int:
    """Without the tables."""
    tables = 64 * (architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim) * 4
    rank = Rank(Parallel(**sizes), index)
    return estimate_weights(architecture, dtype="float16", max_seq_len=64, rank=rank) - tables


def _count(architecture: Architecture, held: Any) -> int:
    """Bytes of 16-bit weights, tensor by tensor; `held`: the share of a mapping that one GPU has."""
    total = 0.0
    for mapping in layout_for(architecture).mappings():
        if not mapping.optional:
            total += math.prod(mapping.target_shape) * (4 if mapping.role == "router" else 2) * held(mapping)
    return int(total)


def test_tensor_parallelism_splits_heads_and_columns_only() -> None:
    whole = ("q_a_", "kv_a_", "norm", "ln_f", "router")
    expected = _count(V2, lambda m: 1 if any(part in m.target for part in whole) else 0.25)
    assert _weights(V2, tensor=4) == expected < _weights(V2)
    llama = _count(LLAMA, lambda m: 1 if any(part in m.target for part in whole) else 0.5)
    assert _weights(LLAMA, tensor=2) == llama


def test_expert_parallelism_splits_experts_as_tensor_parallelism_does() -> None:
    """Whole experts in place of columns: as many bytes."""
    for expert in (1, 2, 4):
        assert _weights(V2, tensor=4, expert=expert) == _weights(V2, tensor=4)


def test_pipeline_stages_hold_the_whole_model_once() -> None:
    for architecture in (V2, LLAMA):
        assert sum(_weights(architecture, stage, pipeline=2) for stage in (0, 1)) == _weights(architecture)


def test_a_tied_head_is_at_both_ends() -> None:
    tied = parse_architecture(LLAMA_CONFIG | {"num_hidden_layers": 4, "tie_word_embeddings": True})
    parts = sum(_weights(tied, stage, pipeline=2) for stage in (0, 1))
    assert parts == _weights(tied) + 2 * tied.vocab_size * tied.hidden_size


def test_the_first_stage_keeps_the_dense_layers() -> None:
    first, second = (shrink(V2, rank) for rank in Parallel(pipeline=2).ranks)
    assert [first.is_routed(layer) for layer in range(2)] == [False, True]
    assert [second.is_routed(layer) for layer in range(2)] == [True, True]


@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"tensor": 4, "expert": 2}, {"tensor": 2, "pipeline": 2}])
def test_ranks_hold_what_they_are_given(sizes: dict[str, int], tmp_path: Path) -> None:
    """Against the slices of a checkpoint, tensor by tensor."""
    folder = CheckpointFolder.open(write_engine_checkpoint(tmp_path / "v2", TINY_V2))
    for rank in Parallel(**sizes).ranks:
        given = slice_source(folder, folder.architecture, rank).tensors.values()
        expected = sum(math.prod(tensor.shape) * (4 if "router" in tensor.name else 2) for tensor in given)
        assert _weights(folder.architecture, rank.index, **sizes) == expected


def test_one_gpus_part_of_v3() -> None:
    """671B parameters in INT4 are 4.125 + 16/128 bits each, over 8 GPUs; attention's latent and the embedding stay."""
    part = plan_memory(Design(V3, dtype="float16", rules=RULES, parallel=Parallel(tensor=8)), limits(16, 4096))
    experts = ROUTED_LAYERS * 256 * 3 * 7168 * 2048 * (0.5 + 2 / 128)
    assert experts / 8 < part.weights_bytes < experts / 8 * 1.2
    whole = plan_memory(Design(V3, dtype="float16", rules=RULES), limits(16, 4096))
    assert part.kv_bytes_per_token == whole.kv_bytes_per_token  # one latent, read by all heads
    assert part.workspace_bytes < whole.workspace_bytes
    assert whole.total_bytes > A100 > part.total_bytes


@pytest.mark.parametrize("parallel", [Parallel(8), Parallel(8, expert=8), Parallel(8, expert=2)])
def test_what_fits_has_room_and_one_more_has_not(parallel: Parallel) -> None:
    given = limits(8, 2048)
    for fit in fit_batches(Design(V3, dtype="float16", rules=RULES, parallel=parallel), given, gpu_bytes=A100):
        assert fit.batch > 8
        plan = plan_memory(Design(V3, dtype="float16", rules=RULES, parallel=parallel), limits(fit.batch, fit.length))
        # Its context step may be larger than the limits', so this is no more than what fits.
        assert plan.weights_bytes + plan.pool_bytes + plan.workspaces[1][1].nbytes < A100


def test_kv_heads_are_split_with_the_query_heads() -> None:
    whole = plan_memory(Design(LLAMA, dtype="float16"), limits(2, 128))
    part = plan_memory(Design(LLAMA, dtype="float16", parallel=Parallel(tensor=2, pipeline=2)), limits(2, 128))
    assert part.kv_bytes_per_token * 4 == whole.kv_bytes_per_token


def test_experts_are_sent_rows_for_each_of_a_tokens_experts() -> None:
    """An eighth of the experts, on a row for each of the 8 experts that a token has: what they write is as large."""
    given = limits(8, 2048)
    whole, part = (
        dict(plan_memory(Design(V3, dtype="float16", parallel=parallel), given).workspaces[0][1].terms)
        for parallel in (Parallel(), Parallel(8, expert=8))
    )
    assert part["experts_down"] == whole["experts_down"] == 256 * 1024 * 7168 * 2
