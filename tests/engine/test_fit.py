from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.engine.fit import fit_batches
from pipeline.engine.memory import Design, plan_memory
from pipeline.quantization.patterns import find_pattern
from pipeline.quantization.selection import Rules
from tests.engine.test_memory import LLM_7B, PLUGINS, ROLES, V3_SIZES, limits


def test_where_no_pages_are_copied_more_sequences_fit() -> None:
    """And about twice as many with a quantized cache, where the cache is what fills the GPU."""
    choices: tuple[dict[str, Any], ...] = ({}, {"lowering": PLUGINS}, {"lowering": PLUGINS, "kv_cache": "int8"})
    fits = [
        fit_batches(Design(LLM_7B, dtype="float16", **options), limits(64, 4096), gpu_bytes=80 << 30)[-1].batch
        for options in choices
    ]
    assert fits[0] < fits[1] and 1.9 < fits[2] / fits[1] < 2.1


@pytest.mark.parametrize("gpu_gib", [24, 80])
def test_the_largest_batch_fits_and_one_more_does_not(gpu_gib: int) -> None:
    available, rules = gpu_gib << 30, Rules(method="rtn", include=ROLES)
    fits = fit_batches(Design(LLM_7B, dtype="float16", rules=rules), limits(4, 4096), gpu_bytes=available)
    assert [fit.length for fit in fits] == [1024, 2048, 4096]
    weights = plan_memory(Design(LLM_7B, dtype="float16", rules=rules), limits(4, 4096)).weights_bytes
    for fit in fits:
        assert fit.batch > 4

        def needed(batch: int, length: int = fit.length) -> int:
            # The context phase stays at the limits' 4 sequences: an extra rectangle, not measured here.
            plan = plan_memory(Design(LLM_7B, dtype="float16", rules=rules), limits(batch, length))
            generation = plan.workspaces[1][1].nbytes
            small = plan_memory(Design(LLM_7B, dtype="float16"), limits(4, length, max_chunk=1024 * 2 // batch or 1))
            workspace = max(generation, small.workspaces[0][1].nbytes)
            return plan.total_bytes - plan.workspace_bytes + workspace + weights - plan.weights_bytes

        assert needed(fit.batch) <= available < needed(fit.batch + 1)


def test_too_small_a_gpu_fits_nothing() -> None:
    fits = fit_batches(Design(LLM_7B, dtype="float16"), limits(1, 4096), gpu_bytes=8 << 30)
    assert {fit.batch for fit in fits} == {0}


def test_as_fast_for_ninety_thousand_tensors() -> None:
    architecture = parse_architecture(V3_SIZES)
    rules = Rules(method="rtn", include=ROLES, exclude=("transformer.layers.60.*",))

    def measure() -> float:
        find_pattern.cache_clear()
        began = time.process_time()
        plan_memory(Design(architecture, dtype="bfloat16", rules=rules), limits(16, 32768))
        fit_batches(Design(architecture, dtype="bfloat16", rules=rules), limits(16, 32768), gpu_bytes=640 << 30)
        return time.process_time() - began

    assert min(measure() for _ in range(5)) < 0.5  # other work on the machine only adds to it
