"""One grouped product's sizes: the shapes of its weights and scales, and its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.operation import POINTERS, Argument, Kernel, Launch, bind, divide_up, power_of_two

MODULE = "plugins.moe_experts.kernel"
BLOCK = 128  # of FP8 blocks
PLAIN, FP8, FP8_BLOCKS, INT4 = "plain", "fp8", "fp8_blocks", "int4"
# Storage -> kernel.py's number, inputs of one turn of its loop: as many as keep weights and their scales in registers.
STORAGES = {PLAIN: (0, 64), FP8: (1, 64), FP8_BLOCKS: (2, 64), INT4: (3, 128)}
FEWEST_INPUTS = 32  # of one turn: FP8's matrix instruction takes no fewer
# Rows of a program's tile: where an expert has few of them, and else. Then a turn is shorter, and of two products half
# the columns are done, so that sums and weights stay in registers.
FEW_ROWS, MANY_ROWS = 16, 64
COLUMNS, MANY_DEPTH = 64, 64
MOST_TILES = 4  # of one expert that are under way at once; a program takes the others one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x [n, inner] times each expert's [out, inner]ᵀ. `gated`: two of them, silu(first) * second, for pairs from rows;
    else one, for rows that are in order. prescale: 0 none, 1 one for all experts, 2 one for each. step: of the input,
    in which it is rounded to FP8; 0 leaves it as it is."""

    dtype: str
    gated: bool
    out: int
    inner: int
    storage: str
    group: int
    step: float
    top_k: int
    prescale: int = 0

    def weight_shape(self, experts: int) -> tuple[int, int, int]:
        if self.storage == INT4:
            return experts, self.out // 2, self.inner
        if self.storage == FP8_BLOCKS:
            _, rows, columns = self.scale_shape(experts)
            return experts, rows * BLOCK, columns * BLOCK
        return experts, self.out, self.inner

    def weight_type(self) -> str:
        return self.dtype if self.storage == PLAIN else "int8"

    def scale_shape(self, experts: int) -> tuple[int, int, int]:
        return {
            PLAIN: (experts, 0, 0),
            FP8: (experts, 1, 1),
            FP8_BLOCKS: (experts, divide_up(self.out, BLOCK), divide_up(self.inner, BLOCK)),
            INT4: (experts, self.inner // max(self.group, 1), self.out),
        }[self.storage]

    def scale_type(self) -> str:
        return self.dtype if self.storage == INT4 else "float32"

    def columns(self, rows: int) -> int:
        """Of a program."""
        return COLUMNS // 2 if self.gated and rows == MANY_ROWS else COLUMNS

    def kernel(self, rows: int) -> Kernel:
        number, depth = STORAGES[self.storage]
        depth = min(depth, self.group or depth, max(power_of_two(self.inner), FEWEST_INPUTS))
        if self.dtype == "float32":
            depth = FEWEST_INPUTS
        if rows == MANY_ROWS:
            depth = min(depth, MANY_DEPTH)
        (_, height, stride), (_, *scales) = self.weight_shape(1), self.scale_shape(1)
        kinds = {
            "source": POINTERS[self.dtype],
            "order": "*i32",
            "starts": "*i32",
            "left": POINTERS[self.weight_type()],
            "left_scales": POINTERS[self.scale_type()],
            "right": POINTERS[self.weight_type()],
            "right_scales": POINTERS[self.scale_type()],
            "prescale": POINTERS[self.dtype],
            "target": POINTERS[self.dtype],
            "step": "fp32",
        }
        absent = [] if self.gated else ["right", "right_scales"]
        absent += [] if self.prescale else ["prescale"]
        absent += ["left_scales", "right_scales"] if self.storage == PLAIN else []
        absent += [] if self.step else ["step"]
        constants: dict[str, Any] = {
            "GATED": self.gated,
            "TOP_K": self.top_k,
            "OUT": self.out,
            "INNER": self.inner,
            "STRIDE": stride,
            "STACK": height * stride,
            "SCALES": scales[0] * scales[1],
            "STORAGE": number,
            "GROUP": BLOCK if self.storage == FP8_BLOCKS else self.group,
            "STEPPED": bool(self.step),
            "PRESCALE": self.prescale,
            "ROWS": rows,
            "COLUMNS": self.columns(rows),
            "DEPTH": depth,
            **dict.fromkeys(absent),
        }
        return Kernel(
            module=MODULE,
            function="multiply",
            parameters=tuple((name, kind) for name, kind in kinds.items() if name not in absent),
            constants=tuple(constants.items()),
            warps=4 if rows == FEW_ROWS else 8,
            stages=3,
        )

    def launch(self, rows: int, few: bool, experts: int, given: Mapping[str, Argument]) -> tuple[Launch, ...]:
        """For `rows` of the step, whatever pairs they make: an expert has at most one of each."""
        tile = FEW_ROWS if few else MANY_ROWS
        kernel = self.kernel(tile)
        named = {name: value for name, value in {**given, "step": self.step}.items() if name in dict(kernel.parameters)}
        grid = (divide_up(self.out, self.columns(tile)), experts, min(divide_up(rows, tile), MOST_TILES))
        return bind(kernel, grid, named)
