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
from dataclasses import dataclass, replace
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
class _Rope(Operation):
    """What both have in common. DATA: names of the inputs before the tables, which are the kernel's first parameters.
    POOLS: those of the pools, its last ones."""

    LOWERING: ClassVar[str] = "rope_paged_kv"
    DATA: ClassVar[tuple[str, ...]]
    POOLS: ClassVar[tuple[str, ...]]
    FUNCTION: ClassVar[str]

    dtype: str
    heads: int
    rotary_size: int
    interleaved: bool
    scale: float
    block_size: int
    pool_dtype: str

    def sizes(self) -> dict[str, Any]:
        """The kernel's own constants."""
        raise NotImplementedError

    def groups(self, take: int) -> int:
        """Programs of one row, of so many heads each."""
        raise NotImplementedError

    def pool_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def query_width(self) -> int:
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs, as the kernel calls them; pad_index only says how long the longest chunk is."""
        scales = ("scales",) if self.pool_dtype in STORAGE else ()
        return (*self.DATA, "cos", "sin", "positions", "slots", "unpad", "pad", "tables", *self.POOLS, *scales)

    def input_types(self) -> tuple[str, ...]:
        scales = ("float32",) if self.pool_dtype in STORAGE else ()
        step, pools = ["int32"] * len(STEP_INPUTS), [self.pool_dtype] * len(self.POOLS)
        return (*[self.dtype] * len(self.DATA), "float32", "float32", *step, *pools, *scales)

    def with_wide_cache(self) -> _Rope:
        return replace(self, pool_dtype=self.dtype)

    def outputs(self) -> tuple[Output, ...]:
        places = [self.names.index(name) for name in self.POOLS]
        return (
            Output(shape=(Size(0, 0), self.heads, self.query_width()), dtype=self.dtype),
            *(Output(shape=(Size(i, 0), *self.pool_shape()), dtype=self.pool_dtype, updates=i) for i in places),
        )

    def kernels(self) -> tuple[Kernel, ...]:
        sizes = self.sizes()
        constants = {
            **sizes,
            "HEADS": self.heads,
            "TILE": power_of_two(sizes.get("RANK") or sizes["SIZE"]),
            "ROTARY": self.rotary_size,
            "HALF": power_of_two(self.rotary_size // 2),
            "PAIRS": self.interleaved,
            "BLOCK": self.block_size,
            "TAKE": _take(self.heads, sizes.get("RANK") or sizes["SIZE"]),
            "STORAGE": STORAGE.get(self.pool_dtype, 0),
            **({} if self.pool_dtype in STORAGE else {"scales": None}),
        }
        memory = dict(zip(self.names, self.input_types(), strict=True)) | {"query": self.dtype}
        order = (*self.DATA, "cos", "sin", *STEP, "scales", "query", *self.POOLS)
        return (
            Kernel(
                module=MODULE,
                function=self.FUNCTION,
                parameters=(
                    *((name, POINTERS[memory[name]]) for name in order if name in memory),
                    *(("rows", "i32"), ("queries", "i32"), ("width", "i32"), ("factor", "fp32")),
                ),
                constants=tuple(constants.items()),
                warps=4,
            ),
        )

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch, ...]:
        (kernel,) = self.kernels()
        rows, names = shapes[0][0], self.names
        arguments: dict[str, Argument] = {name: Input(i) for i, name in enumerate(names) if name != "pad"}
        arguments |= {name: Result(i) for i, name in enumerate(("query", *self.POOLS))}
        queries, width = shapes[names.index("pad")][1], shapes[names.index("tables")][1]
        arguments |= {"rows": rows, "queries": queries, "width": width, "factor": self.scale}
        return bind(kernel, (rows, self.groups(dict(kernel.constants)["TAKE"]), 1), arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePagedKv(_Rope):
    """Llama's and Qwen2's: query = rotate(q) * scale; k_pool and v_pool take rotate(k) and v.

    in: qkv [T, (heads + 2 kv_heads) * head_size] dtype, q | k | v; cos, sin [P, rotary_size / 2] fp32, with the
        attention scaling; position_ids, slot_ids, unpad_index [T], pad_index [B, Q], block_tables [B, MB] int32;
        k_pool, v_pool [NB, kv_heads, block_size, head_size] pool_dtype; scales [2, kv_heads] fp32 (k, v), if quantized
    out: query [T, heads, head_size] dtype; k_pool and v_pool at their inputs' addresses

    The first `rotary_size` elements of a head turn: even with odd where `interleaved`, else the two halves; the others
    are copied. Computed in fp32, rounded once.
    """

    NAME: ClassVar[str] = "rope_paged_kv"
    FUNCTION: ClassVar[str] = "write_heads"
    DATA: ClassVar[tuple[str, ...]] = ("qkv",)
    POOLS: ClassVar[tuple[str, ...]] = ("k_pool", "v_pool")
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("qkv", 2), ("cos", 2), ("sin", 2), *STEP_INPUTS),
        *(("k_pool", 4), ("v_pool", 4), ("scales?", 2)),
    )

    kv_heads: int
    head_size: int

    def query_width(self) -> int:
        return self.head_size

    def pool_shape(self) -> tuple[int, ...]:
        return (self.kv_heads, self.block_size, self.head_size)

    def groups(self, take: int) -> int:
        return divide_up(self.heads, take) + 2 * divide_up(self.kv_heads, take)

    def sizes(self) -> dict[str, Any]:
        rest = self.head_size - self.rotary_size
        return {
            "STRIDE": (self.heads + 2 * self.kv_heads) * self.head_size,
            "KV_HEADS": self.kv_heads,
            "SIZE": self.head_size,
            "REST": power_of_two(rest) if rest else 1,
        }

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.rope_paged_kv.reference import rotate_and_append

        return rotate_and_append(self, *inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePagedLatent(_Rope):
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
    FUNCTION: ClassVar[str] = "write_latent"
    DATA: ClassVar[tuple[str, ...]] = ("q", "absorbed", "content", "compressed")
    POOLS: ClassVar[tuple[str, ...]] = ("pool",)
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("q", 2), ("absorbed", 3), ("content", 2), ("compressed", 2), ("cos", 2), ("sin", 2)),
        *(*STEP_INPUTS, ("pool", 4), ("scales?", 1)),
    )

    q_size: int
    rank: int

    def query_width(self) -> int:
        return self.rank + self.rotary_size

    def pool_shape(self) -> tuple[int, ...]:
        return (1, self.block_size, self.query_width())

    def groups(self, take: int) -> int:
        return divide_up(self.heads, take) + 1

    def sizes(self) -> dict[str, Any]:
        return {"Q_SIZE": self.q_size, "Q_SKIP": self.q_size - self.rotary_size, "RANK": self.rank}

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.rope_paged_kv.reference import rotate_and_append_latent

        return rotate_and_append_latent(self, *inputs)
