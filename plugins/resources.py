"""Compiles every kernel for every SM, at the sizes of real models: `python -m plugins.resources` writes resources.md.

What to look for: spills other than 0; more than 99 KB of shared memory, which SM89 and SM120 do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugins.compiler import SMS, compile_kernel
from plugins.moe_all_to_all.message import PAYLOADS
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.moe_experts.operation import MoeExperts
from plugins.operation import Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent

Sizes = dict[str, Any]  # of an operation, by name
TABLE = Path(__file__).with_name("resources.md")
HEAD = """# Kernels as compiled

`python -m plugins.resources` writes this table, with Triton 3.7.1 and the assemblers that it carries; no GPU is needed.
Registers of a thread, bytes that it spills, bytes of shared memory of a program.

| operation | model | kernel | SM | threads | registers | spills | shared |
|---|---|---|---|---|---|---|---|
"""
_HEADS: Sizes = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 64}
_LATENT: Sizes = {"rank": 512, "rotary_size": 64, "block_size": 64}
_MLA_ROPE: Sizes = {**_LATENT, "q_size": 192, "interleaved": True, "scale": 0.1147}
_ROUTED: dict[str, Sizes] = {
    "V2-Lite, 8 ranks": {"dtype": "float16", "first": 0, "ranks": 8, "experts": 64, "top_k": 6, "hidden": 2048},
    "V3, 32 ranks": {"dtype": "bfloat16", "first": 0, "ranks": 32, "experts": 256, "top_k": 8, "hidden": 7168},
}
_EXPERTS: dict[str, Sizes] = {
    "V2-Lite": {"dtype": "float16", "hidden": 2048, "width": 1408, "experts": 64, "count": 64, "top_k": 6},
    "V3": {"dtype": "bfloat16", "hidden": 7168, "width": 2048, "experts": 256, "count": 256, "top_k": 8},
}
# Storage of both products -> its group, its step.
_STORAGES = {"plain": (0, 0.0), "int4": (128, 0.0), "fp8": (0, 0.02), "fp8_blocks": (0, 0.0)}
_ROPE: Sizes = {**_HEADS, "rotary_size": 128, "interleaved": False, "scale": 0.0884}


def list_subjects() -> Iterator[tuple[str, Operation, tuple[int, ...]]]:
    """Model, operation, and the SMs it is meant for."""
    half: Sizes = {"dtype": "float16"}
    brain: Sizes = {"dtype": "bfloat16"}
    eight = tuple(sm for sm in SMS if sm >= 89)
    for pool, sms in (("float16", SMS), ("int8", SMS), ("fp8", eight)):
        cache = "" if pool == "float16" else f", {pool} cache"
        yield f"Llama-8B{cache}", RopePagedKv(**half, **_ROPE, pool_dtype=pool), sms
        yield f"Llama-8B{cache}", PagedAttention(**half, **_HEADS, window=0, pool_dtype=pool), sms
    for model, heads, types in (("V2-Lite", 16, half), ("V3", 128, brain)):
        for pool, sms in ((types["dtype"], SMS), ("fp8", eight)):
            cache = "" if pool != "fp8" else ", fp8 cache"
            rope = RopePagedLatent(**types, **_MLA_ROPE, heads=heads, pool_dtype=pool)
            yield model + cache, rope, sms
            attention = PagedLatentAttention(**types, **_LATENT, heads=heads, window=0, pool_dtype=pool)
            yield model + cache, attention, sms
    for model, sizes in _ROUTED.items():
        for payload in PAYLOADS:
            sent = "" if payload == "model" else ", fp8 payload"
            yield model + sent, MoeDispatch(**sizes, payload=payload), SMS
        yield model, MoeCombine(**sizes), SMS
    yield from list_experts()


def list_experts() -> Iterator[tuple[str, Operation, tuple[int, ...]]]:
    """As `list_subjects`. V3's experts are FP8 or INT4: in 16 bits, those of one layer are 22 GB."""
    for model, sizes in _EXPERTS.items():
        for storage, (group, step) in _STORAGES.items():
            if (model, storage) in (("V3", "plain"), ("V2-Lite", "fp8_blocks")):
                continue
            up: Sizes = {"up_storage": storage, "up_group": group, "up_step": step}
            down: Sizes = {"down_storage": storage, "down_group": group, "down_step": step}
            yield f"{model}, {storage}", MoeExperts(**sizes, **up, **down, first=0, prescale=""), SMS


def write_rows(model: str, operation: Operation, sm: int) -> Iterator[str]:
    for kernel in operation.kernels():
        made = compile_kernel(kernel, sm)
        constants = dict(kernel.constants)
        variant = "".join(f", {name.lower()}" for name in ("SPLIT", "GATED") if constants.get(name))
        name = f"{kernel.function} of {constants['ROWS']} rows{variant}" if "ROWS" in constants else kernel.function
        yield (
            f"| {operation.NAME} | {model} | {name} | {sm} | {made.threads} | {made.registers} | {made.spills} | "
            f"{made.shared} |\n"
        )


def main() -> None:
    rows = [row for model, operation, sms in list_subjects() for sm in sms for row in write_rows(model, operation, sm)]
    TABLE.write_text(HEAD + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
