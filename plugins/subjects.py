"""What kernels are compiled, tested on a GPU, and timed for: the sizes of real models, and every variant of the code.

A kernel's constants are sizes, and choices that decide what code it is: types, how weights are stored, which pairs
turn. No list can have every size that a config may ask for; this one has every choice, so that kernels which have
passed have passed in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from plugins.compiler import SMS
from plugins.moe_all_to_all.message import PAYLOADS
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.moe_experts.operation import PRESCALES, MoeExperts
from plugins.operation import Kernel, Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent

Sizes = dict[str, Any]  # of an operation, by name
DTYPES = ("float16", "bfloat16", "float32")
CACHES = ("", "int8", "fp8")  # "": the model's type
WITH_FP8 = tuple(sm for sm in SMS if sm >= 89)
_HEADS: Sizes = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 64}
_ROPE: Sizes = {**_HEADS, "rotary_size": 128, "interleaved": False, "scale": 0.0884}
_LATENT: Sizes = {"rank": 512, "rotary_size": 64, "block_size": 64}
_MLA_ROPE: Sizes = {**_LATENT, "q_size": 192, "scale": 0.1147}
_MLA_HEADS = {"V2-Lite": 16, "V3": 128}
_TYPES = {"V2-Lite": "float16", "V3": "bfloat16"}
_ROUTED: dict[str, Sizes] = {
    "V2-Lite": {"first": 0, "ranks": 8, "experts": 64, "top_k": 6, "hidden": 2048},
    "V3": {"first": 0, "ranks": 32, "experts": 256, "top_k": 8, "hidden": 7168},
}
_EXPERTS: dict[str, Sizes] = {
    "V2-Lite": {"hidden": 2048, "width": 1408, "experts": 64, "count": 64, "top_k": 6, "first": 0},
    "V3": {"hidden": 7168, "width": 2048, "experts": 256, "count": 256, "top_k": 8, "first": 0},
}
# Name of a storage, here of all three linears -> itself, its group, its step.
STORAGES = {
    "plain": ("plain", 0, 0.0),
    "int4": ("int4", 128, 0.0),
    "fp8": ("fp8", 0, 0.02),
    "fp8_blocks": ("fp8_blocks", 0, 0.0),
    "int4 by 64": ("int4", 64, 0.0),
    "int4 by 32": ("int4", 32, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An operation, by the model whose sizes it has and what else tells it apart, and the SMs that it is meant for.
    timed: at the choices that the model is used with; else held against the reference only."""

    model: str
    operation: Operation
    sms: tuple[int, ...]
    timed: bool


def list_subjects() -> Iterator[Subject]:
    """Real models first, then whatever has a kernel that none before it has."""
    seen = set[Kernel]()
    for timed, listed in ((True, _list_models()), (False, _list_variants())):
        for model, operation in listed:
            kernels = set(operation.kernels())
            if timed or not kernels <= seen:
                yield Subject(model=model, operation=operation, sms=_list_sms(operation), timed=timed)
            seen |= kernels


def _list_sms(operation: Operation) -> tuple[int, ...]:
    return WITH_FP8 if "fp8" in (*operation.input_types(), *(o.dtype for o in operation.outputs())) else SMS


def _list_models() -> Iterator[tuple[str, Operation]]:
    """V3's experts are FP8 or INT4: in 16 bits, those of one layer are 22 GB."""
    for cache in CACHES:
        yield from _attend_grouped("Llama-8B", "float16", cache)
    for model, dtype in _TYPES.items():
        for cache in CACHES:
            yield from _attend_latent(model, dtype, cache, True)
    for model, dtype in _TYPES.items():
        yield from _exchange(model, dtype)
    for model, kinds in (("V2-Lite", ("plain", "int4", "fp8")), ("V3", ("int4", "fp8", "fp8_blocks"))):
        for kind in kinds:
            yield _take_experts(model, _TYPES[model], kind, "")


def _list_variants() -> Iterator[tuple[str, Operation]]:
    """At the sizes of the smaller models. Experts' products are kernels of their own, so that both ways may be stored
    alike here."""
    for dtype in DTYPES:
        for cache in CACHES:
            yield from _attend_grouped("Llama-8B", dtype, cache)
            for interleaved in (True, False):
                yield from _attend_latent("V2-Lite", dtype, cache, interleaved)
        yield from _exchange("V2-Lite", dtype)
        for kind, prescale in product(STORAGES, PRESCALES):
            yield _take_experts("V2-Lite", dtype, kind, prescale)


def _attend_grouped(model: str, dtype: str, cache: str) -> Iterator[tuple[str, Operation]]:
    name, pool = _name(model, dtype, cache and f"{cache} cache"), cache or dtype
    yield name, RopePagedKv(dtype=dtype, **_ROPE, pool_dtype=pool)
    yield name, PagedAttention(dtype=dtype, **_HEADS, window=0, pool_dtype=pool)


def _attend_latent(model: str, dtype: str, cache: str, interleaved: bool) -> Iterator[tuple[str, Operation]]:
    name, pool = _name(model, dtype, cache and f"{cache} cache", "" if interleaved else "halves turn"), cache or dtype
    sizes: Sizes = {"dtype": dtype, "heads": _MLA_HEADS[model], "pool_dtype": pool}
    yield name, RopePagedLatent(**sizes, **_MLA_ROPE, interleaved=interleaved)
    yield name, PagedLatentAttention(**sizes, **_LATENT, window=0)


def _exchange(model: str, dtype: str) -> Iterator[tuple[str, Operation]]:
    sizes = _ROUTED[model]
    ranks = f"{sizes['ranks']} ranks"
    for payload in PAYLOADS:
        sent = "" if payload == "model" else f"{payload} payload"
        yield _name(model, dtype, ranks, sent), MoeDispatch(dtype=dtype, **sizes, payload=payload)
    yield _name(model, dtype, ranks), MoeCombine(dtype=dtype, **sizes)


def _take_experts(model: str, dtype: str, kind: str, prescale: str) -> tuple[str, Operation]:
    storage, group, step = STORAGES[kind]
    up: Sizes = {"up_storage": storage, "up_group": group, "up_step": step}
    down: Sizes = {"down_storage": storage, "down_group": group, "down_step": step}
    scaled = prescale and f"prescale {prescale}"
    operation = MoeExperts(dtype=dtype, **_EXPERTS[model], **up, **down, prescale=prescale)
    return _name(model, dtype, kind, scaled), operation


def _name(model: str, dtype: str, *words: str) -> str:
    """The model's usual type goes without saying."""
    usual = _TYPES.get(model, "float16")
    return ", ".join(filter(None, (model, "" if dtype == usual else dtype, *words)))
