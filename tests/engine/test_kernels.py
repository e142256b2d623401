"""The bar of `plan`: within a tenth of what the engine that is built states."""

from __future__ import annotations

import pytest

from pipeline.engine.kernels import plan_workspace
from pipeline.engine.memory import estimate_weights
from pipeline.quantization.selection import Rules
from tests.engine.conftest import LLAMA_INT4, V2_INT4, Built

ENGINES = [("llama_engine", LLAMA_INT4), ("v2_engine", V2_INT4)]


@pytest.mark.parametrize(("which", "_"), ENGINES)
def test_workspace_is_within_a_tenth(which: str, _: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    for profile, stated in zip(built.limits.profiles(), built.description.profiles, strict=True):
        planned = plan_workspace(built.architecture, profile, dtype="float16", block_size=64, moe="dense")
        assert stated.workspace_bytes is not None
        assert planned.nbytes == pytest.approx(stated.workspace_bytes, rel=0.1), planned.terms[:8]


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
