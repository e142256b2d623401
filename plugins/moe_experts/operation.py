"""Routed experts (SwiGLU MLPs), each on the rows that chose it: grouped on the device, weighted, and added up.

Sizes: T rows of the step, k experts of each, H the model's width, I an expert's, E experts that are here: numbers
`first` to `first + count` of `experts`. With fewer than all, as on a rank of expert parallelism, a pair of a row and an
expert that is elsewhere adds nothing, and the ranks' results add up to the whole. Limits: a row names an expert once
at most (its pairs are still all computed if not); a number outside of [0, experts) is nobody's, as padding's may be.
T may be 0, experts may have no rows, one may have all. Inputs are dense.

How weights are stored, those of fc and gate alike (`up_…`), those of proj (`down_…`):

    plain        dtype [E, out, in]
    fp8          E4M3's bytes as int8 [E, out, in], scales fp32 [E, 1, 1]. The input is rounded to E4M3 in steps of
                 `…_step`, the product is of E4M3 numbers, in hardware from SM89 on; `…_step` 0: the input stays
    fp8_blocks   E4M3's bytes as int8 [E, out, in], both rounded up to 128, scales fp32 [E, out/128, in/128]; the input
                 stays 16-bit, and weights are widened in registers, which also SM80 can
    int4         two's complement, pairs along out, low nibble first, [E, out/2, in]; scales dtype [E, in/group, out],
                 group 32, 64 or 128

Sums are fp32, of INT4 and FP8 blocks group by group: sum * scale. What is rounded to dtype: silu(fc) * gate, times
`prescale` where there is one, and each expert's output before it is weighted. Nothing depends on timing: the same
inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plugins.moe_experts.products import FEW_ROWS, MANY_ROWS, MODULE, PLAIN, Product
from plugins.operation import (
    BYTES,
    POINTERS,
    SCRATCH_ALIGNMENT,
    Argument,
    Input,
    Kernel,
    Launch,
    Operation,
    Output,
    Result,
    Scratch,
    Shape,
    Size,
    bind,
    divide_up,
    power_of_two,
)

PAIRS_AT_ONCE, COLUMNS_AT_ONCE = 2048, 1024  # of a program of group_pairs, of combine
PRESCALES = {"": 0, "shared": 1, "each": 2}


def lay_out(experts: int, pairs: int, inside: int, outside: int) -> tuple[int, ...]:
    """Where in the workspace the starts, the order, the pairs' gated rows of `inside` bytes and their outputs of
    `outside` bytes begin, and its end."""
    ends = [0]
    for nbytes in (4 * (experts + 1), 4 * pairs, pairs * inside, pairs * outside):
        ends.append(ends[-1] + divide_up(nbytes, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT)
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeExperts(Operation):
    """sum over k of weights * proj(silu(fc(x)) * gate(x)), in float32.

    in: x [T, H] dtype; weights [T, k] fp32, indices [T, k] int32, as the router makes them; fc, gate [E, I, H], proj
        [E, H, I] as stored; fc_scales, gate_scales, proj_scales [E, …] unless plain; prescale [1 or E, 1, I] dtype, of
        proj's input, if `prescale` is "shared" or "each" (that of x is the network's business)
    out: [T, H] fp32
    """

    NAME: ClassVar[str] = "moe_experts"
    LOWERING: ClassVar[str] = "moe_experts"
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (
        *(("x", 2), ("weights", 2), ("indices", 2), ("fc", 3), ("gate", 3), ("proj", 3)),
        *(("fc_scales?", 3), ("gate_scales?", 3), ("proj_scales?", 3), ("prescale?", 3)),
    )
    STORED: ClassVar[tuple[int, ...]] = (3, 4, 5)

    dtype: str
    hidden: int
    width: int
    experts: int
    first: int
    count: int
    top_k: int
    up_storage: str
    up_group: int
    up_step: float
    down_storage: str
    down_group: int
    down_step: float
    prescale: str

    def up(self) -> Product:
        return Product(
            dtype=self.dtype,
            gated=True,
            out=self.width,
            inner=self.hidden,
            storage=self.up_storage,
            group=self.up_group,
            step=self.up_step,
            top_k=self.top_k,
            prescale=PRESCALES[self.prescale],
        )

    def down(self) -> Product:
        return Product(
            dtype=self.dtype,
            gated=False,
            out=self.hidden,
            inner=self.width,
            storage=self.down_storage,
            group=self.down_group,
            step=self.down_step,
            top_k=self.top_k,
        )

    def described_inputs(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of each input there is, of a step of no rows."""
        up, down = self.up(), self.down()
        yield "x", self.dtype, (0, self.hidden)
        yield "weights", "float32", (0, self.top_k)
        yield "indices", "int32", (0, self.top_k)
        named = (("fc", up), ("gate", up), ("proj", down))
        for name, product in named:
            yield name, product.weight_type(), product.weight_shape(self.count)
        for name, product in named:
            if product.storage != PLAIN:
                yield f"{name}_scales", product.scale_type(), product.scale_shape(self.count)
        if self.prescale:
            yield "prescale", self.dtype, (self.count if self.prescale == "each" else 1, 1, self.width)

    def input_names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.described_inputs())

    def input_types(self) -> tuple[str, ...]:
        return tuple(dtype for _, dtype, _ in self.described_inputs())

    def outputs(self) -> tuple[Output, ...]:
        return (Output(shape=(Size(0, 0), self.hidden), dtype="float32"),)

    def kernels(self) -> tuple[Kernel, ...]:
        products = [product.kernel(rows) for product in (self.up(), self.down()) for rows in (FEW_ROWS, MANY_ROWS)]
        return (self._group(), *products, self._combine())

    def _group(self) -> Kernel:
        return Kernel(
            module=MODULE,
            function="group_pairs",
            parameters=(("indices", "*i32"), ("starts", "*i32"), ("order", "*i32"), ("pairs", "i32")),
            constants=(("FIRST", self.first), ("COUNT", self.count), ("TILE", PAIRS_AT_ONCE)),
            warps=4,
        )

    def _combine(self) -> Kernel:
        return Kernel(
            module=MODULE,
            function="combine",
            parameters=(
                *(("parts", POINTERS[self.dtype]), ("weights", "*fp32"), ("indices", "*i32"), ("output", "*fp32")),
            ),
            constants=(
                *(("TOP_K", self.top_k), ("HIDDEN", self.hidden), ("FIRST", self.first), ("COUNT", self.count)),
                ("TILE", min(power_of_two(self.hidden), COLUMNS_AT_ONCE)),
            ),
            warps=4,
        )

    def _places(self, rows: int) -> tuple[int, ...]:
        pairs, element = rows * self.top_k, BYTES[self.dtype]
        return lay_out(self.count, pairs, self.width * element, self.hidden * element)

    def scratch_bytes(self, shapes: Sequence[Shape]) -> int:
        return self._places(shapes[0][0])[-1]

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch, ...]:
        rows = shapes[0][0]
        if not rows:
            return ()
        pairs = rows * self.top_k
        inputs: dict[str, Argument] = {name: Input(index) for index, name in enumerate(self.input_names())}
        starts, order, gated, parts, _ = map(Scratch, self._places(rows))
        given = {"order": order, "starts": starts}
        up: dict[str, Argument] = {**given, "source": inputs["x"], "target": gated, "left": inputs["fc"]}
        up |= {"right": inputs["gate"]}
        down: dict[str, Argument] = {**given, "source": gated, "target": parts, "left": inputs["proj"]}
        for name, argument in inputs.items():
            up |= {{"fc_scales": "left_scales", "gate_scales": "right_scales"}.get(name, name): argument}
            down |= {{"proj_scales": "left_scales"}.get(name, name): argument}
        few = pairs <= FEW_ROWS * self.experts
        return (
            *bind(self._group(), (self.count, 1, 1), {"indices": inputs["indices"], **given, "pairs": pairs}),
            *self.up().launch(rows, few, self.count, up),
            *self.down().launch(rows, few, self.count, down),
            *bind(
                self._combine(),
                (rows, divide_up(self.hidden, COLUMNS_AT_ONCE), 1),
                {"parts": parts, "weights": inputs["weights"], "indices": inputs["indices"], "output": Result(0)},
            ),
        )

    def without_rounding(self) -> MoeExperts:
        return replace(self, up_step=0.0, down_step=0.0)

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.moe_experts.reference import apply_experts

        return (apply_experts(self, dict(zip(self.input_names(), inputs, strict=True))),)
