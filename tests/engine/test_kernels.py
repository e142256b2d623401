"""The bar of `plan`: up to a tenth above what the engine that is built states, and never below."""

from __future__ import annotations

import pytest

from benchmarks import stripped, synthetic
from pipeline.checkpoint.architecture import parse_architecture
from pipeline.engine.kernels import plan_workspace
from pipeline.engine.weights import FP8_ROLES, estimate_weights, list_block_roles
from pipeline.network.spec import Lowering
from pipeline.quantization.selection import Rules
from tests.engine.conftest import LLAMA_INT4, MADE_BLOCKS, MOE_INT4, V2_INT4, Built

ENGINES = [("llama_engine", LLAMA_INT4), ("moe_engine", MOE_INT4), ("v2_engine", V2_INT4)]


@pytest.mark.parametrize(("which", "_"), ENGINES)
def test_workspace_is_at_most_a_tenth_more(which: str, _: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    for profile, stated in zip(built.limits.profiles(), built.description.profiles, strict=True):
        planned = plan_workspace(built.architecture, profile, dtype="float16", block_size=64, moe="dense")
        assert stated.workspace_bytes is not None
        assert 1 <= planned.nbytes / stated.workspace_bytes <= 1.1, planned.terms[:8]


@pytest.mark.parametrize(("which", "int4"), ENGINES)
def test_weights_are_within_a_fiftieth(which: str, int4: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    rules = Rules(method="rtn", include=int4, group_size=64)
    planned = estimate_weights(built.architecture, dtype="float16", max_seq_len=built.spec.max_seq_len, rules=rules)
    assert planned == pytest.approx(built.description.weights_bytes, rel=0.02)


def test_terms_name_what_the_workspace_is_made_of(llama_engine: Built) -> None:
    context, wide, _ = llama_engine.limits.profiles()
    terms = plan_workspace(llama_engine.architecture, wide, dtype="float16", block_size=64, moe="dense").terms
    assert {name for name, _ in terms[:2]} == {"gathered_keys", "gathered_values"}
    assert terms[0][1] == 32 * 1024 * 2 * 64 * 2  # batch, length, KV heads, head size, bytes
    terms = plan_workspace(llama_engine.architecture, context, dtype="float16", block_size=64, moe="dense").terms
    assert ("mask", 8 * 64 * 4096 * 2) in terms  # batch, chunk, length, bytes


def test_weights_in_fp8_blocks_are_dequantized_one_at_a_time(fp8_engine: Built) -> None:
    """Each into the workspace; not all at once, which would take what the model in 16 bits takes."""
    built, architecture = fp8_engine, fp8_engine.architecture
    experts = 48 * 512 * 256 * 2  # bytes of one matrix of all experts of a layer in bfloat16
    weights = estimate_weights(architecture, dtype="bfloat16", max_seq_len=built.spec.max_seq_len, fp8=True)
    assert weights == pytest.approx(built.description.weights_bytes, rel=0.02)
    for profile, stated in zip(built.limits.profiles(), built.description.profiles, strict=True):
        planned = plan_workspace(
            architecture, profile, dtype="bfloat16", block_size=64, moe="dense", blocks=frozenset(FP8_ROLES)
        )
        assert stated.workspace_bytes is not None
        assert 1 <= planned.nbytes / stated.workspace_bytes <= 1.06, planned.terms[:8]
        in_16_bits = plan_workspace(architecture, profile, dtype="bfloat16", block_size=64, moe="dense")
        assert planned.nbytes > in_16_bits.nbytes or profile.phase == "context"
    assert experts < (built.description.profiles[1].workspace_bytes or 0) < 3 * experts  # of the six there are


def test_blocks_that_a_method_made_are_dequantized_too(made_blocks_engine: Built) -> None:
    built, architecture = made_blocks_engine, made_blocks_engine.architecture
    blocks = list_block_roles(architecture, MADE_BLOCKS.rules, fp8=False)
    assert blocks == {*MADE_BLOCKS.include}
    for profile, stated in zip(built.limits.profiles(), built.description.profiles, strict=True):
        planned = plan_workspace(architecture, profile, dtype="bfloat16", block_size=64, moe="dense", blocks=blocks)
        assert stated.workspace_bytes is not None
        assert 1 <= planned.nbytes / stated.workspace_bytes <= 1.06, planned.terms[:8]


def test_plugins_at_the_shapes_of_v2_lite() -> None:
    """As engines of it stated, of all 27 layers and of 3 alike: `python -m benchmarks.scale plugins v2-lite`."""
    lowering = Lowering(rope_paged_kv="plugin", paged_attention="plugin", moe_experts="plugin")
    architecture, stated = parse_architecture(synthetic.V2_LITE), (269_222_400, 22_152_704)
    for profile, nbytes in zip(stripped.LIMITS.profiles(), stated, strict=True):
        planned = plan_workspace(architecture, profile, dtype="float16", block_size=64, moe="dense", lowering=lowering)
        assert 1 <= planned.nbytes / nbytes <= 1.1, planned.terms[:8]
        assert not any(name.startswith("gathered") for name, _ in planned.terms)
