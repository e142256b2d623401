"""Attention over the paged pool, read by block table in the kernel: prompts' chunks, single tokens, and both at once.

Sizes: T rows of the step, B sequences, Q the longest chunk, MB columns of the block table, NB blocks of a pool. Limits
of both operations: sequence b's rows are pad_index[b], in order, and their slots follow one another; each row of T is
in one sequence. A row attends to the slots of its own sequence up to its own, of which block_tables[b] has all blocks,
and with a `window` other than 0 to the last `window` of them only. Queries come scaled. Block 0 and whatever else lies
in a sequence's blocks is finite (a masked NaN would still be one). Pools and inputs are dense. Nothing is padded: a
short chunk beside a long one costs programs that end at once.

The keys of a sequence with one row are split over programs where sequences are few and block tables wide, whatever the
others of the step have. A chunk of several rows never is: its tiles are programs enough, and partial sums would take
workspace by its rows. So the workspace is of one size for all steps.

Pools of type "int8" and "fp8" hold value / scale, as rope_paged_kv writes them. FP8 needs SM89.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plugins.operation import Argument, Input, Kernel, Launch, Operation, Output, Shape, Size
from plugins.paged_attention.sizes import QUANTIZED, Sizes

STEP_INPUTS = (("slot_ids", 1), ("pad_index", 2), ("block_tables", 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paged(Operation):
    """What both have in common. POOLS: the pools' names among the kernel's parameters."""

    VERSION: ClassVar[str] = "2"  # 1: kernels without `least` and `most`, parts by row
    LOWERING: ClassVar[str] = "paged_attention"
    POOLS: ClassVar[tuple[str, ...]]

    dtype: str
    heads: int
    block_size: int
    window: int
    pool_dtype: str

    def sizes(self) -> Sizes:
        raise NotImplementedError

    def input_types(self) -> tuple[str, ...]:
        scales = ("float32",) if self.pool_dtype in QUANTIZED else ()
        return (self.dtype, *[self.pool_dtype] * len(self.POOLS), *["int32"] * len(STEP_INPUTS), *scales)

    def with_wide_cache(self) -> _Paged:
        return replace(self, pool_dtype=self.dtype)

    def outputs(self) -> tuple[Output, ...]:
        return (Output(shape=(Size(0, 0), self.heads, self.sizes().value_size), dtype=self.dtype),)

    def kernels(self) -> tuple[Kernel, ...]:
        return self.sizes().kernels()

    def scratch_bytes(self, shapes: Sequence[Shape]) -> int:
        return self.sizes().scratch_bytes()

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch, ...]:
        names = ("query", *self.POOLS, "slots", "pad", "tables", "scales")[: len(self.input_types())]
        inputs: dict[str, Argument] = {name: Input(index) for index, name in enumerate(names)}
        pad, tables = (shapes[names.index(name)] for name in ("pad", "tables"))
        return self.sizes().launches(shapes[0][0], pad, tables, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention(_Paged):
    """softmax(query kᵀ) v, of grouped heads: query head i reads key head i * kv_heads // heads.

    in: query [T, heads, head_size] dtype; k_pool, v_pool [NB, kv_heads, block_size, head_size] pool_dtype; slot_ids
        [T], pad_index [B, Q], block_tables [B, MB] int32; scales [2, kv_heads] fp32 (k, v), if quantized
    out: [T, heads, head_size] dtype
    """

    NAME: ClassVar[str] = "paged_attention"
    POOLS: ClassVar[tuple[str, ...]] = ("k_pool", "v_pool")
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("query", 3), ("k_pool", 4), ("v_pool", 4)),
        *(*STEP_INPUTS, ("scales?", 2)),
    )

    kv_heads: int
    head_size: int

    def sizes(self) -> Sizes:
        return Sizes(
            dtype=self.dtype,
            pool_dtype=self.pool_dtype,
            heads=self.heads,
            kv_heads=self.kv_heads,
            main=self.head_size,
            extra=0,
            value=self.head_size,
            block_size=self.block_size,
            window=self.window,
        )

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.paged_attention.reference import attend

        return (attend(self, *inputs),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLatentAttention(_Paged):
    """softmax(query poolᵀ) content, of absorbed MLA: one row per token is the key of all heads, and its first `rank`
    columns the value.

    in: query [T, heads, rank + rotary_size] dtype; pool [NB, 1, block_size, rank + rotary_size] pool_dtype; slot_ids
        [T], pad_index [B, Q], block_tables [B, MB] int32; scales [2] fp32 (content, key), if quantized
    out: [T, heads, rank] dtype
    """

    NAME: ClassVar[str] = "paged_latent_attention"
    POOLS: ClassVar[tuple[str, ...]] = ("k_pool",)
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (("query", 3), ("pool", 4), *STEP_INPUTS, ("scales?", 1))

    rank: int
    rotary_size: int

    def sizes(self) -> Sizes:
        return Sizes(
            dtype=self.dtype,
            pool_dtype=self.pool_dtype,
            heads=self.heads,
            kv_heads=1,
            main=self.rank,
            extra=self.rotary_size,
            value=0,
            block_size=self.block_size,
            window=self.window,
        )

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.paged_attention.reference import attend_latent

        return (attend_latent(self, *inputs),)
