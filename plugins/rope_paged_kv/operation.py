"""Rotates q and k and writes k and v, or MLA's latent row, straight into the paged pool: one kernel, one read.

Sizes: T rows of the step, B sequences, Q the longest chunk, MB columns of the block table, P rows of the RoPE tables,
NB blocks of a pool. Limits of both operations: a row's place is `block_tables[sequence][slot // block_size]`, at
`slot % block_size`, where `sequence = unpad_index // Q`; two rows with one place are a race (the padding's rows may,
in block 0, which nobody reads unmasked). Positions lie within the tables. Pools and inputs are dense.

pool_dtype "int8" and "fp8" store value / scale, rounded to the nearest (ties to even) and saturated at 127 and 448;
scales are fp32, of the whole engine. FP8 (E4M3) needs SM89. Otherwise pool_dtype is dtype, and there is no `scales`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from plugins.operation import (
    POINTERS,
    Argument,
    Input,
    Kernel,
    Launch,
    Operation,
    Output,
    Result,
    Shape,
    Size,
    bind,
    divide_up,
    power_of_two,
)

MODULE = "plugins.rope_paged_kv.kernel"
STORAGE = {"int8": 1, "fp8": 2}  # kernel.py's numbers; 0 for a pool of the model's type
ELEMENTS = 2048  # of one program, about: 16 bytes for each thread at a time
STEP = ("positions", "slots", "unpad", "tables")
STEP_INPUTS = (("position_ids", 1), ("slot_ids", 1), ("unpad_index", 1), ("pad_index", 2), ("block_tables", 2))


def _take(heads: int, width: int) -> int:
    """Heads of one program: a power of two."""
    return min(power_of_two(heads), max(ELEMENTS // width, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePagedKv(Operation):
    """Llama's and Qwen2's: query = rotate(q) * scale; k_pool and v_pool take rotate(k) and v.

    in: qkv [T, (heads + 2 kv_heads) * head_size] dtype, q | k | v; cos, sin [P, rotary_size / 2] fp32, with the
        attention scaling; position_ids, slot_ids, unpad_index [T], pad_index [B, Q], block_tables [B, MB] int32;
        k_pool, v_pool [NB, kv_heads, block_size, head_size] pool_dtype; scales [2, kv_heads] fp32 (k, v), if quantized
    out: query [T, heads, head_size] dtype; k_pool and v_pool at their inputs' addresses

    The first `rotary_size` elements of a head turn: even with odd where `interleaved`, else the two halves; the others
    are copied. Computed in fp32, rounded once.
    """

    NAME: ClassVar[str] = "rope_paged_kv"
    LOWERING: ClassVar[str] = "rope_paged_kv"
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("qkv", 2), ("cos", 2), ("sin", 2), *STEP_INPUTS),
        *(("k_pool", 4), ("v_pool", 4), ("scales?", 2)),
    )

    dtype: str
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    interleaved: bool
    scale: float
    block_size: int
    pool_dtype: str

    def input_types(self) -> tuple[str, ...]:
        scales = ("float32",) if self.pool_dtype in STORAGE else ()
        return (self.dtype, "float32", "float32", *["int32"] * 5, self.pool_dtype, self.pool_dtype, *scales)

    def outputs(self) -> tuple[Output, ...]:
        pool = (self.kv_heads, self.block_size, self.head_size)
        return (
            Output(shape=(Size(0, 0), self.heads, self.head_size), dtype=self.dtype),
            Output(shape=(Size(8, 0), *pool), dtype=self.pool_dtype, updates=8),
            Output(shape=(Size(9, 0), *pool), dtype=self.pool_dtype, updates=9),
        )

    def kernels(self) -> tuple[Kernel, ...]:
        model, pool = POINTERS[self.dtype], POINTERS[self.pool_dtype]
        scales = [("scales", "*fp32")] if self.pool_dtype in STORAGE else []
        rest = self.head_size - self.rotary_size
        constants: dict[str, Any] = {
            "STRIDE": (self.heads + 2 * self.kv_heads) * self.head_size,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "SIZE": self.head_size,
            "ROTARY": self.rotary_size,
            "HALF": power_of_two(self.rotary_size // 2),
            "PAIRS": self.interleaved,
            "REST": power_of_two(rest) if rest else 1,
            "TILE": power_of_two(self.head_size),
            "BLOCK": self.block_size,
            "TAKE": _take(self.heads, self.head_size),
            "STORAGE": STORAGE.get(self.pool_dtype, 0),
            **({} if scales else {"scales": None}),
        }
        return (
            Kernel(
                module=MODULE,
                function="write_heads",
                parameters=(
                    *(("qkv", model), ("cos", "*fp32"), ("sin", "*fp32"), *((name, "*i32") for name in STEP)),
                    *(*scales, ("query", model), ("k_pool", pool), ("v_pool", pool)),
                    *(("queries", "i32"), ("width", "i32"), ("factor", "fp32")),
                ),
                constants=tuple(constants.items()),
                warps=4,
            ),
        )

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch, ...]:
        (kernel,) = self.kernels()
        take = dict(kernel.constants)["TAKE"]
        groups = divide_up(self.heads, take) + 2 * divide_up(self.kv_heads, take)
        arguments: dict[str, Argument] = {
            **{name: Input(index) for index, name in enumerate(("qkv", "cos", "sin", *STEP[:3]))},
            "tables": Input(7),
            **({"scales": Input(10)} if self.pool_dtype in STORAGE else {}),
            "query": Result(0),
            "k_pool": Result(1),
            "v_pool": Result(2),
            "queries": shapes[6][1],
            "width": shapes[7][1],
            "factor": self.scale,
        }
        return bind(kernel, (shapes[0][0], groups, 1), arguments)

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.rope_paged_kv.reference import rotate_and_append

        return rotate_and_append(self, *inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePagedLatent(Operation):
    """DeepSeek's absorbed MLA: query = [absorbed | rotate(q's last part)] * scale; the pool takes
    [content | rotate(key)].

    in: q [T, heads * q_size] dtype, the projection's output; absorbed [heads, T, rank] dtype; content [T, rank] dtype,
        the normalized compressed KV; compressed [T, rank + rotary_size] dtype, as projected; cos, sin [P, rotary_size
        / 2] fp32, with the attention scaling; position_ids, slot_ids, unpad_index [T], pad_index [B, Q], block_tables
        [B, MB] int32; pool [NB, 1, block_size, rank + rotary_size] pool_dtype; scales [2] fp32 (content, key), if
        quantized
    out: query [T, heads, rank + rotary_size] dtype; pool at its input's address

    The last `rotary_size` of each head's `q_size` elements turn, and those of `compressed`. Computed in fp32, rounded
    once.
    """

    NAME: ClassVar[str] = "rope_paged_latent"
    LOWERING: ClassVar[str] = "rope_paged_kv"
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("q", 2), ("absorbed", 3), ("content", 2), ("compressed", 2), ("cos", 2), ("sin", 2)),
        *(*STEP_INPUTS, ("pool", 4), ("scales?", 1)),
    )

    dtype: str
    heads: int
    q_size: int
    rank: int
    rotary_size: int
    interleaved: bool
    scale: float
    block_size: int
    pool_dtype: str

    def input_types(self) -> tuple[str, ...]:
        scales = ("float32",) if self.pool_dtype in STORAGE else ()
        return (*[self.dtype] * 4, "float32", "float32", *["int32"] * 5, self.pool_dtype, *scales)

    def outputs(self) -> tuple[Output, ...]:
        width = self.rank + self.rotary_size
        return (
            Output(shape=(Size(0, 0), self.heads, width), dtype=self.dtype),
            Output(shape=(Size(11, 0), 1, self.block_size, width), dtype=self.pool_dtype, updates=11),
        )

    def kernels(self) -> tuple[Kernel, ...]:
        model, pool = POINTERS[self.dtype], POINTERS[self.pool_dtype]
        scales = [("scales", "*fp32")] if self.pool_dtype in STORAGE else []
        constants: dict[str, Any] = {
            "HEADS": self.heads,
            "Q_SIZE": self.q_size,
            "Q_SKIP": self.q_size - self.rotary_size,
            "RANK": self.rank,
            "TILE": power_of_two(self.rank),
            "ROTARY": self.rotary_size,
            "HALF": power_of_two(self.rotary_size // 2),
            "PAIRS": self.interleaved,
            "BLOCK": self.block_size,
            "TAKE": _take(self.heads, self.rank),
            "STORAGE": STORAGE.get(self.pool_dtype, 0),
            **({} if scales else {"scales": None}),
        }
        return (
            Kernel(
                module=MODULE,
                function="write_latent",
                parameters=(
                    *((name, model) for name in ("q", "absorbed", "content", "compressed")),
                    *(("cos", "*fp32"), ("sin", "*fp32"), *((name, "*i32") for name in STEP)),
                    *(*scales, ("query", model), ("pool", pool)),
                    *(("rows", "i32"), ("queries", "i32"), ("width", "i32"), ("factor", "fp32")),
                ),
                constants=tuple(constants.items()),
                warps=4,
            ),
        )

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch, ...]:
        (kernel,) = self.kernels()
        groups = divide_up(self.heads, dict(kernel.constants)["TAKE"]) + 1
        names = ("q", "absorbed", "content", "compressed", "cos", "sin", *STEP[:3])
        arguments: dict[str, Argument] = {
            **{name: Input(index) for index, name in enumerate(names)},
            "tables": Input(10),
            **({"scales": Input(12)} if self.pool_dtype in STORAGE else {}),
            "query": Result(0),
            "pool": Result(1),
            "rows": shapes[0][0],
            "queries": shapes[9][1],
            "width": shapes[10][1],
            "factor": self.scale,
        }
        return bind(kernel, (shapes[0][0], groups, 1), arguments)

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.rope_paged_kv.reference import rotate_and_append_latent

        return rotate_and_append_latent(self, *inputs)
