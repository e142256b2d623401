"""Engines with plugins: built without a GPU, their kernels inside, and described."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.cli.inspection import describe
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription, load_description
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.kernels import plan_workspace
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.sharding import Parallel, Rank
from tests.engine.checkpoints import TINY_LLAMA, TINY_V2, write_engine_checkpoint

LIMITS = BuildLimits(
    max_seq_len=256,
    max_batch_size=8,
    max_num_tokens=64,
    generation=(Rectangle(batch=8, length=256),),
    max_blocks=40,
    max_chunk=32,
)
SPEC = NetworkSpec(
    dtype="float16",
    max_seq_len=256,
    block_size=LIMITS.block_size,
    lowering=Lowering(rope_paged_kv="plugin", paged_attention="plugin"),
)


def build(folder: Path, config: dict[str, Any], spec: NetworkSpec = SPEC, sm: int = 80) -> Path:
    write_engine_checkpoint(folder / "checkpoint", config, cache_scales=spec.kv_cache != "model")
    build_engine(
        backend="tensorrt_rtx",
        checkpoint=folder / "checkpoint",
        spec=spec,
        limits=LIMITS,
        sm=sm,
        output=folder / "model.engine",
        log=folder / "build.log",
    )
    return folder / "model.engine"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (TINY_LLAMA, {"rope_paged_kv": b"write_heads", "paged_attention": b"attend"}),
        pytest.param(
            TINY_V2, {"rope_paged_latent": b"write_latent", "paged_latent_attention": b"attend"}, marks=pytest.mark.slow
        ),
    ],
    ids=["llama", "v2"],
)
def test_an_engine_carries_its_kernels(config: dict[str, Any], names: dict[str, bytes], tmp_path: Path) -> None:
    path = build(tmp_path, config)
    description, engine, data = load_description(tmp_path), inspect_engine(path), path.read_bytes()
    assert description.spec.lowering == SPEC.lowering
    assert {plugin.operation: plugin.layers for plugin in description.plugins} == dict.fromkeys(names, 2)
    for plugin in description.plugins:
        assert b".entry " + names[plugin.operation] in data
        for kernel in plugin.kernels:
            assert (kernel.sm, kernel.spills) == (80, 0)
    assert b".target sm_80" in data
    assert str(Path.cwd()).encode() not in data
    # The tensors that plugins hand to TensorRT's own graphs are none of the engine's inputs and outputs.
    assert {tensor.name for tensor in engine.tensors} == {t.name for t in (*description.inputs, *description.outputs)}
    assert len(engine.profiles) == 2 and all(profile.workspace_bytes > 0 for profile in engine.profiles)
    assert not any("mha" in kernel for profile in engine.profiles for kernel in profile.graph.kernels)
    check_workspace(description, config)
    told = describe(tmp_path)
    assert told["lowering"] == {
        "rope_paged_kv": "plugin",
        "paged_attention": "plugin",
        "moe_all_to_all": "native",
        "moe_experts": "native",
    }
    assert {row["operation"] for row in told["plugin_kernels"]} == set(names)
    assert {(row["compiled_for"], row["passed"], row["run"]) for row in told["plugin_kernels"]} == {
        ("SM80", False, None)
    }


@pytest.mark.parametrize(
    ("config", "kind", "sm"), [(TINY_LLAMA, "int8", 80), (TINY_V2, "fp8", 89)], ids=["llama-int8", "v2-fp8"]
)
def test_an_engine_may_have_a_quantized_cache(config: dict[str, Any], kind: str, sm: int, tmp_path: Path) -> None:
    path = build(tmp_path, config, replace(SPEC, kv_cache=kind), sm)
    description, engine = load_description(tmp_path), inspect_engine(path)
    assert description.spec.kv_cache == kind
    pools = {tensor.name: tensor for tensor in engine.tensors if "_pool_" in tensor.name}
    assert len(pools) == 4 * len(parse_architecture(config).cache_widths)
    assert {tensor.dtype for tensor in pools.values()} == {kind}
    assert {tensor.dtype for tensor in description.inputs if tensor.name in pools} == {kind}
    assert all(kernel.sm == sm for plugin in description.plugins for kernel in plugin.kernels)
    check_workspace(description, config)


def check_workspace(description: EngineDescription, config: dict[str, Any]) -> None:
    """As in test_kernels.py: never below what the file states."""
    for profile, stated in zip(LIMITS.profiles(), description.profiles, strict=True):
        planned = plan_workspace(
            parse_architecture(config), profile, dtype="float16", block_size=64, moe="dense",
            lowering=description.spec.lowering,
        )  # fmt: skip
        assert stated.workspace_bytes is not None
        assert 1 <= planned.nbytes / stated.workspace_bytes <= 1.1, planned.terms[:8]


@pytest.mark.slow
def test_a_rank_carries_what_exchanges_its_rows(tmp_path: Path) -> None:
    """FP8 on SM80, which has no such type: it is encoded with integers."""
    lowering, rank = Lowering(moe_all_to_all="plugin"), Rank(Parallel(2, expert=2), 1)
    path = build(tmp_path, TINY_V2, replace(SPEC, lowering=lowering, rank=rank, expert_payload="fp8"))
    description, engine, data = load_description(tmp_path), inspect_engine(path), path.read_bytes()
    assert description.spec == replace(SPEC, lowering=lowering, rank=rank, expert_payload="fp8")
    assert {plugin.operation: plugin.layers for plugin in description.plugins} == {"moe_dispatch": 1, "moe_combine": 1}
    for name in (b"rank_tokens", b"pack", b"unpack", b"combine"):
        assert b".entry " + name in data
    for profile in engine.profiles:
        assert profile.graph.kernels["custom_layer"] == 2
        assert profile.workspace_bytes > 0
    assert b"comm_alltoall" not in data


@pytest.mark.slow
def test_a_lowering_may_be_mixed(tmp_path: Path) -> None:
    path = build(tmp_path, TINY_LLAMA, replace(SPEC, lowering=Lowering(rope_paged_kv="plugin")))
    description = load_description(tmp_path)
    assert [plugin.operation for plugin in description.plugins] == ["rope_paged_kv"]
    check_workspace(description, TINY_LLAMA)
    assert inspect_engine(path).profiles[0].graph.kernels["_gemm_mha_v2"] == 2
