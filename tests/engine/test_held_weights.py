"""What `plan` counts of linears that another tool has quantized: what an engine holds of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.foreign.counting import count_kinds
from pipeline.checkpoint.foreign.holding import Held, Holding
from pipeline.checkpoint.layouts import layout_for, list_kinds
from pipeline.checkpoint.source import list_holding
from pipeline.engine.builder import build_engine
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.weights import estimate_weights, list_block_roles
from pipeline.network.spec import NetworkSpec
from pipeline.quantization.selection import NOTHING
from pipeline.sharding.ranks import Parallel
from pipeline.workspace import FolderWorkspace
from tests.checkpoint.foreign.cases import write
from tests.fixtures import LLAMA_CONFIG, V2_CONFIG

LIMITS = BuildLimits(
    max_seq_len=128,
    max_batch_size=2,
    max_num_tokens=32,
    generation=(Rectangle(batch=2, length=128),),
    block_size=64,
    max_blocks=5,
)


@pytest.mark.parametrize(
    "name",
    [
        "compressed-fp8-dynamic",
        "modelopt-int4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("compressed-fp8-blocks", "modelopt-int8")),
    ],
)
def test_an_engine_holds_what_was_counted(name: str, tmp_path: Path) -> None:
    source, checkpoint = CheckpointFolder.open(write(name, tmp_path)), tmp_path / "checkpoint"
    convert_checkpoint(source, FolderWorkspace(checkpoint), dtype=None, overflow="refuse")
    architecture = CheckpointFolder.open(checkpoint).architecture
    built = build_engine(
        backend="tensorrt_rtx",
        checkpoint=checkpoint,
        spec=NetworkSpec(dtype=architecture.dtype, max_seq_len=LIMITS.max_seq_len, block_size=LIMITS.block_size),
        limits=LIMITS,
        sm=89,
        output=tmp_path / "model.engine",
        log=tmp_path / "build.log",
    )
    held = count_kinds(list_kinds(architecture), list_holding(source, None))
    planned = estimate_weights(architecture, dtype=architecture.dtype, max_seq_len=128, held=held)
    assert planned == pytest.approx(built.weights_bytes, rel=0.01)


def test_each_format_takes_what_it_does() -> None:
    architecture = parse_architecture(LLAMA_CONFIG | {"num_hidden_layers": 3})
    shapes = {mapping.target: mapping.target_shape for mapping in layout_for(architecture).mappings()}
    rows, columns = shapes["transformer.layers.0.mlp.fc.weight"]
    size, places = rows * columns, [f"transformer.layers.{layer}.mlp.fc.weight" for layer in range(3)]
    plain = estimate_weights(architecture, dtype="bfloat16", max_seq_len=1)
    blocks = math.ceil(rows / 128) * math.ceil(columns / 128)
    for held, nbytes in (
        (Held(format="fp8_rows"), size + 4 * rows),
        (Held(format="fp8_rows", rounds=True), size + 4 * rows + 4),
        (Held(format="fp8", rounds=True), size + 8),
        (Held(format="int8"), size + 4 * rows),
        (Held(format="int8_sq", rounds=True, prescaled=True), size + 4 * rows + 4 + 2 * columns),
        (Held(format="int4", group=32), size // 2 + size // 32 * 2),
        (Held(format="int4", group=32, prescaled=True, rounded=0.1), size // 2 + size // 32 * 2 + 2 * columns),
        (Held(format="fp8_blocks"), blocks * (128 * 128 + 4)),
    ):
        # Of three layers the last is held in 16 bits: no format has it.
        holding: Holding = {places[0]: held, places[1]: held, places[2]: "has zero points"}
        kinds = count_kinds(list_kinds(architecture), holding)
        counted = estimate_weights(architecture, dtype="bfloat16", max_seq_len=1, held=kinds)
        assert plain - counted == 2 * (2 * size - nbytes), held
        is_blocks = held.format == "fp8_blocks"
        assert list_block_roles(architecture, NOTHING, fp8=False, held=kinds) == ({"mlp"} if is_blocks else set())


def test_ranks_share_it() -> None:
    architecture = parse_architecture(V2_CONFIG | {"num_hidden_layers": 3})
    held = Held(format="int8")
    names = [m.target for m in layout_for(architecture).mappings() if ".experts." in m.target]
    kinds = count_kinds(list_kinds(architecture), dict.fromkeys(names, held))
    parallel = Parallel(tensor=2, expert=2)
    saved = []
    for rank in (Parallel().ranks[0], *parallel.ranks):
        wide, narrow = (
            estimate_weights(architecture, dtype="float16", max_seq_len=1, held=each, rank=rank) for each in ({}, kinds)
        )
        saved.append(wide - narrow)
    assert saved[0] == 2 * saved[1] == 2 * saved[2] > 0


def test_nothing_held_is_nothing_counted() -> None:
    architecture = parse_architecture(LLAMA_CONFIG)
    assert count_kinds(list_kinds(architecture), {}) == {}
    assert count_kinds(list_kinds(architecture), {"transformer.layers.0.mlp.fc.weight": "has zero points"}) == {}
