"""The kernels of both operations for one set of sizes: their variants, and what a step of some shape launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.operation import (
    POINTERS,
    SCRATCH_ALIGNMENT,
    Argument,
    Kernel,
    Launch,
    Result,
    Scratch,
    Shape,
    bind,
    divide_up,
    power_of_two,
)

MODULE = "plugins.paged_attention.kernel"
QUANTIZED = ("int8", "fp8")
# Programs to have under way before sequences are no longer split: two for each multiprocessor of an H100.
PROGRAMS = 264
FEWEST_KEYS, MOST_SPLITS = 256, 32  # of a split; of a sequence
SMALLEST = 16  # size of a matrix product's tile, in any direction
MOST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the kernels of both operations are compiled for. value 0: the values are the keys' first `main` columns."""

    dtype: str
    pool_dtype: str
    heads: int
    kv_heads: int
    main: int
    extra: int
    value: int
    block_size: int
    window: int

    @property
    def value_size(self) -> int:
        return self.value or self.main

    @property
    def wide(self) -> bool:
        """Whether tiles must be small for 99 KB of shared memory, and 255 registers, which SM89 and SM120 have."""
        return self.main + self.extra > 256

    @property
    def widened(self) -> bool:
        """Whether keys take more registers than 16-bit ones: as fp32, or beside the 8 bits that they are made of. Of
        wide heads a turn then has half as many, and more threads share them, else registers spill: 4 to 60 bytes of
        8-bit ones, 1 KB of fp32."""
        return self.dtype == "float32" or self.pool_dtype in QUANTIZED

    def rows(self, queries: int) -> int:
        """Rows of a program's tile, for single tokens and for chunks."""
        most = MOST_ROWS >> (self.wide + (self.dtype == "float32"))
        group = power_of_two(self.heads // self.kv_heads)
        return min(most, max(SMALLEST, group if queries == 1 else most))

    def splits(self, sequences: int, width: int) -> int:
        """Over how many programs the keys of a single token are split, in a step of so many sequences."""
        programs = divide_up(self.heads // self.kv_heads, self.rows(1)) * self.kv_heads * sequences
        keys = min(width * self.block_size, self.window or width * self.block_size)
        return max(1, min(PROGRAMS // programs, divide_up(keys, FEWEST_KEYS), MOST_SPLITS))

    @property
    def keys(self) -> int:
        """Of one turn of a program's loop."""
        return min(self.block_size, 64 >> (self.wide + self.wide * self.widened))

    def variant(self, queries: int, split: bool) -> Kernel:
        rows = self.rows(queries)
        model, pool = POINTERS[self.dtype], POINTERS[self.pool_dtype]
        quantized = self.pool_dtype in QUANTIZED
        absent = [] if quantized else ["scales"]
        absent += [] if self.value else ["v_pool"]
        absent += ["output"] if split else ["partial", "stats"]
        kinds = {
            "query": model,
            "k_pool": pool,
            "v_pool": pool,
            "slots": "*i32",
            "pad": "*i32",
            "tables": "*i32",
            "scales": "*fp32",
            "output": model,
            "partial": "*fp32",
            "stats": "*fp32",
            **dict.fromkeys(("sequences", "queries", "least", "most", "width", "splits"), "i32"),
        }
        constants: dict[str, Any] = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "MAIN": self.main,
            "MAIN_TILE": max(power_of_two(self.main), SMALLEST),
            "EXTRA": self.extra,
            "EXTRA_TILE": max(power_of_two(self.extra), SMALLEST),
            "VALUE": self.value_size,
            "VALUE_TILE": max(power_of_two(self.value_size), SMALLEST),
            "LATENT": not self.value,
            "BLOCK": self.block_size,
            "WINDOW": self.window,
            "ROWS": rows,
            "KEYS": self.keys,
            "SPLIT": split,
            "QUANTIZED": quantized,
            **dict.fromkeys(absent),
        }
        return Kernel(
            module=MODULE,
            function="attend",
            parameters=tuple((name, kind) for name, kind in kinds.items() if name not in absent),
            constants=tuple(constants.items()),
            warps=8 if rows > SMALLEST or self.dtype == "float32" or (self.wide and self.widened) else 4,
            stages=1 if self.dtype == "float32" else 2,
        )

    def combine(self) -> Kernel:
        return Kernel(
            module=MODULE,
            function="combine",
            parameters=(
                *(("partial", "*fp32"), ("stats", "*fp32"), ("pad", "*i32"), ("output", POINTERS[self.dtype])),
                *(("sequences", "i32"), ("queries", "i32"), ("splits", "i32")),
            ),
            constants=(
                *(("HEADS", self.heads), ("VALUE", self.value_size)),
                ("VALUE_TILE", power_of_two(self.value_size)),
            ),
            warps=2,
        )

    def kernels(self) -> tuple[Kernel, ...]:
        variants = (self.variant(1, False), self.variant(1, True), self.variant(2, False), self.combine())
        return tuple(dict.fromkeys(variants))

    def part_bytes(self, sequences: int, splits: int) -> tuple[int, int]:
        """Of the splits' sums, and of their maxima and totals: of one row of each sequence, though only those with no
        other have any."""
        parts = sequences * self.heads * splits
        return divide_up(4 * parts * self.value_size, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT, 8 * parts

    def scratch_bytes(self) -> int:
        """For any step: only single tokens are split, and only into so many parts that PROGRAMS are not exceeded by
        more than one per sequence; then there are at most PROGRAMS tiles."""
        return sum(self.part_bytes(1, 1)) * divide_up(PROGRAMS * self.rows(1), self.heads)

    def launches(self, rows: int, pad: Shape, tables: Shape, inputs: Mapping[str, Argument]) -> tuple[Launch, ...]:
        """Whatever lies beside single tokens, they have launches of their own where their keys are split. Which of the
        sequences they are only the kernels see: programs of the others end at once."""
        (sequences, queries), width = pad, tables[1]
        if not rows * sequences * queries:
            return ()
        splits = self.splits(sequences, width)
        apart = splits > 1 and count_singles(rows, sequences, queries) > 0
        counts: dict[str, Argument] = {"sequences": sequences, "queries": queries}
        step: dict[str, Argument] = {**inputs, **counts, "width": width}

        def attend(queries: int, splits: int, least: int, target: Mapping[str, Argument]) -> tuple[Launch, ...]:
            tiles = divide_up(queries * self.heads // self.kv_heads, self.rows(queries))
            given = {**step, **target, "least": least, "most": queries, "splits": splits}
            return bind(self.variant(queries, splits > 1), (tiles, self.kv_heads, sequences * splits), given)

        output: dict[str, Argument] = {"output": Result(0)}
        if not apart:
            return attend(queries, 1, 1, output)
        parts: dict[str, Argument] = {"partial": Scratch(0), "stats": Scratch(self.part_bytes(sequences, splits)[0])}
        last = {**parts, **output, **counts, "pad": inputs["pad"], "splits": splits}
        return (
            *(attend(queries, 1, 2, output) if queries > 1 else ()),
            *attend(1, splits, 1, parts),
            *bind(self.combine(), (sequences, self.heads, 1), last),
        )


def count_singles(rows: int, sequences: int, queries: int) -> int:
    """How many of the sequences may have a single row: all of the others have at most `queries`."""
    return sequences if queries == 1 else (sequences * queries - rows) // (queries - 1)
