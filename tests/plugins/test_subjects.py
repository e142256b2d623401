"""What the benchmark of a GPU runs, and what is compiled for the table of resources: every variant that a config can
ask for, in steps that start every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from benchmarks.kernel_rows import STEPS, list_rows
from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.network.expert_plugin import STORAGES
from pipeline.network.spec import CACHES, PAYLOADS
from pipeline.quantization.catalog import GroupSize
from plugins.compiler import SMS
from plugins.moe_experts.operation import PRESCALES
from plugins.operation import Kernel, Launch, Operation, divide_up
from plugins.registry import OPERATIONS
from plugins.subjects import WITH_FP8, list_subjects
from tests.plugins.experts_cases import BASE
from tests.plugins.test_moe_all_to_all import COMBINE, DISPATCH
from tests.plugins.test_paged_attention import GROUPED, LATENT
from tests.plugins.test_rope_paged_kv import HEADS
from tests.plugins.test_rope_paged_kv import LATENT as LATENT_ROPE

# Kernels' constants that choose code; the others are sizes. `None` for memory that a variant has not is a choice, too.
CHOICES = {"GATED", "STORAGE", "GROUP", "STEPPED", "PRESCALE", "LATENT", "SPLIT", "QUANTIZED", "PAIRS", "FP8"}
SIZES = {
    *("HEADS", "KV_HEADS", "SIZE", "STRIDE", "TILE", "ROTARY", "HALF", "REST", "BLOCK", "TAKE", "Q_SIZE", "Q_SKIP"),
    *("RANK", "MAIN", "MAIN_TILE", "EXTRA", "EXTRA_TILE", "VALUE", "VALUE_TILE", "ROWS", "KEYS", "WINDOW", "TOP_K"),
    *("OUT", "INNER", "STACK", "SCALES", "COLUMNS", "DEPTH", "FIRST", "COUNT", "HIDDEN", "EXPERTS", "LOCAL", "WORDS"),
    *("EXPERTS_AT", "WEIGHTS_AT", "RANKS", "RANK_TILE"),
}


def tell_apart(kernel: Kernel) -> tuple[Any, ...]:
    """What is left of a kernel without its sizes."""
    constants = dict(kernel.constants)
    absent = {name for name, value in constants.items() if value is None}
    assert constants.keys() - absent <= CHOICES | SIZES
    chosen = sorted((name, value) for name, value in constants.items() if name in CHOICES)
    return kernel.module, kernel.function, kernel.parameters, tuple(chosen), frozenset(absent)


def ask() -> Iterator[Operation]:
    """Of every kind, whatever a config can ask for: types of models, caches, payloads, formats of experts."""
    for dtype in MODEL_DTYPES:
        for cache in CACHES:
            pool = dtype if cache == "model" else cache
            for attention in (HEADS, GROUPED, LATENT_ROPE, replace(LATENT_ROPE, interleaved=False), LATENT):
                yield replace(attention, dtype=dtype, pool_dtype=pool)
        for payload in PAYLOADS:
            yield replace(DISPATCH, dtype=dtype, payload=payload)
        yield replace(COMBINE, dtype=dtype)
        for up, down in product(STORAGES.values(), repeat=2):
            for up_group, down_group in product(groups(up), groups(down)):
                for prescale in PRESCALES:
                    yield replace(
                        BASE,
                        dtype=dtype,
                        hidden=128,
                        width=128,
                        up_storage=up,
                        up_group=up_group,
                        up_step=0.02 * (up == "fp8"),
                        down_storage=down,
                        down_group=down_group,
                        down_step=0.02 * (down == "fp8"),
                        prescale=prescale,
                    )


def groups(storage: str) -> tuple[int, ...]:
    sizes: tuple[int, ...] = get_args(GroupSize)
    return sizes if storage == "int4" else (0,)


def test_every_variant_that_a_config_can_ask_for_is_there() -> None:
    asked = {
        (tell_apart(kernel), "fp8" in operation.input_types()) for operation in ask() for kernel in operation.kernels()
    }
    assert len(asked) > 150
    for sm in SMS:
        listed = {
            tell_apart(kernel)
            for subject in list_subjects()
            if sm in subject.sms
            for kernel in subject.operation.kernels()
        }
        missing = [variant for variant, is_fp8 in asked if variant not in listed and (sm in WITH_FP8 or not is_fp8)]
        assert not missing, missing[:3]
    assert {subject.operation.NAME for subject in list_subjects()} == set(OPERATIONS)


def test_subjects_have_names_of_their_own_and_none_is_compiled_in_vain() -> None:
    listed = list(list_subjects())
    names = [(subject.operation.NAME, subject.model) for subject in listed]
    assert len(set(names)) == len(names)
    seen = set[Kernel]()
    for subject in listed:
        kernels = set(subject.operation.kernels())
        assert subject.timed or kernels - seen
        seen |= kernels


@pytest.mark.parametrize("sm", SMS)
def test_rows_start_every_kernel(sm: int) -> None:
    started: dict[Operation, set[Kernel]] = {}
    for row, operation in list_rows(sm):
        shapes = make_shapes(operation, STEPS[row.step])
        found = {launch.kernel for launch in operation.launches(shapes) if isinstance(launch, Launch)}
        started.setdefault(operation, set()).update(found)
    for operation, kernels in started.items():
        assert kernels == set(operation.kernels()), operation


def make_shapes(operation: Operation, spans: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Of inputs of a step, as far as launches depend on them."""
    rows, longest = sum(count for _, count in spans), max(start + count for start, count in spans)
    step = {
        "pad_index": (len(spans), max(count for _, count in spans)),
        "block_tables": (len(spans), divide_up(longest, 64)),
    }
    names = dict(operation.INPUTS)
    dims = {name.removesuffix("?"): number for name, number in names.items()}
    return [step.get(name, (rows, *[1] * (dims[name] - 1))) for name in operation.input_names()]
